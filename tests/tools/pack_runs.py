"""Pack the folders of many runs into one .jsonl file, which `analysis.py curves` reads as it is.

    python tests/tools/pack_runs.py docs/runs/tiny.jsonl runs/tiny/*
    python tests/tools/pack_runs.py docs/runs/map.jsonl runs/map/* --keys reward eval_accuracy

A run's first line holds its name, its flags and a hash of its script; every further line is one of
its metrics.jsonl. Evaluations also carry how many right and wrong responses had which length, with
--additions what count_additions.py finds in them, and with --problems each problem's mean reward
and the share of responses with a box.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from analysis import read_folder, read_json
from common import BadInput
from count_additions import describe


def pack(folder, keys=None, additions=False, problems=False):
    """The lines of a run, as dicts; of its numbers all, or those of `keys`."""
    log = read_folder(folder)
    lines = [{"run": log.name, "config": log.config}]
    if log.source:
        lines[0]["source"] = log.source
    for line in log.lines:
        kept = dict(line)
        if keys:
            kept = {key: line[key] for key in ("step", "eval_dataset", *keys) if key in line}
        if line in log.evals and (additions or problems):
            evaluated = read_json(folder / f"eval-{line['step']}.jsonl")
            if additions:
                kept["additions"] = describe(evaluated)
            if problems:
                kept["problem_rewards"] = [fmean(problem["rewards"]) for problem in evaluated]
                texts = [text for problem in evaluated for text in problem["samples"]]
                kept["boxed"] = fmean("\\boxed{" in text for text in texts)
        lines.append({"run": log.name, **kept})
    return lines


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", help="the .jsonl file to write")
    parser.add_argument("folders", nargs="+", help="run folders")
    parser.add_argument("--keys", nargs="+", help="the numbers to keep (default: all)")
    parser.add_argument(
        "--additions", action="store_true", help="add what count_additions.py finds")  # fmt: skip
    parser.add_argument(
        "--problems", action="store_true", help="add rewards by problem, and boxes")  # fmt: skip
    options = parser.parse_args(argv)
    folders = [Path(folder).resolve() for folder in options.folders]
    names = [folder.name for folder in folders]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInput(f"two of the folders are called {twice[0]}: a run's name must be its own")
    lines = []
    for folder in folders:
        lines += pack(folder, options.keys, options.additions, options.problems)
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    with open(options.output, "w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{options.output}: {len(folders)} runs, {len(lines)} lines")


if __name__ == "__main__":
    try:
        main()
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
