"""analysis.py on the logs of runs: what is averaged, what is drawn, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

import analysis
from common import BadInput
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "tools"))

import count_additions  # noqa: E402
import pack_runs  # noqa: E402


def make_line(step, reward, loss, **more):
    """A training step's line of metrics.jsonl."""
    line = {"step": step, "reward": reward, "loss": loss, "grad_norm": 0.1, "entropy": 0.5}
    line |= {"degenerate_frac": 0.3, "degenerate_iid": 0.2, "completion_len": 12.0}
    return line | more


def make_run(folder, script="grpo", seed=0, accuracies=(0.4, 0.5), lengths=None, **flags):
    """A run's folder: two steps between evaluations.

    lengths: for each evaluation two lists, the token counts of right and of wrong responses.
    """
    folder.mkdir(parents=True)
    config = {"script": script, "seed": seed, "output_dir": str(folder), "group_size": 8} | flags
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"step": 0, "eval_accuracy": accuracies[0]}]
    for i, accuracy in enumerate(accuracies[1:]):
        for step in (2 * i + 1, 2 * i + 2):
            lines.append(make_line(step, 0.4 + step / 10, step / 10 + seed / 100))
        lines.append({"step": 2 * i + 2, "eval_accuracy": accuracy})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for i, (right, wrong) in enumerate(lengths or []):
        sample = {"question": "?", "answer": "1", "samples": ["?"] * len(right + wrong)}
        sample |= {"rewards": [1.0] * len(right) + [0.5] * len(wrong), "lengths": right + wrong}
        (folder / f"eval-{2 * i}.jsonl").write_text(json.dumps(sample) + "\n")
    return str(folder)


def run(*argv):
    """(tables, figure) of a command."""
    options = analysis.parse_options([str(x) for x in argv])
    return options.function(options)


def drawn(figure):
    """Everything that is drawn: the numbers of all lines and bands, panel by panel."""
    panels = []
    for axis in figure.axes:
        lines = [line.get_xydata().tolist() for line in axis.lines]
        panels.append(lines + [c.get_paths()[0].vertices.tolist() for c in axis.collections])
    return panels


def labels_of(*folders):
    groups = analysis.group_logs(analysis.read_logs(folders))
    return {label: len(logs) for label, logs in groups.items()}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


# --- what is averaged ---
def test_runs_are_grouped_by_all_that_differs_but_the_seed(tmp_path):
    off = {"entropy_gate": False, "progress_weight": 0.1}
    folders = [
        make_run(tmp_path / "a", "grpo", 0),
        make_run(tmp_path / "b", "grpo", 1, save_every=7),
        make_run(tmp_path / "c", "grpo", 0, group_size=4),
        make_run(tmp_path / "d", "length_alpha", 0, alpha=0.5),
        make_run(tmp_path / "e", "length_alpha", 0, alpha=1.0),
        make_run(tmp_path / "f", "ep_grpo", 0, entropy_gate=True, progress_weight=0.1),
        make_run(tmp_path / "g", "ep_grpo", 0, **off),
        make_run(tmp_path / "h", "ep_grpo", 1, **off),
    ]
    labels = labels_of(*folders)
    assert labels == {
        "grpo G=8": 2,
        "grpo G=4": 1,
        "length_alpha α=0.5 G=8": 1,
        "length_alpha α=1.0 G=8": 1,
        "ep_grpo G=8": 1,
        "ep_grpo no entropy_gate G=8": 2,
    }
    assert len(set(analysis.choose_colours(labels).values())) == len(labels)


def test_only_equal_settings_are_averaged_whatever_the_ends_of_names(tmp_path):
    folders = [
        make_run(tmp_path / name, "grpo", seed, model=f"runs/{name}/checkpoint-500", beta=seed / 10)
        for seed, name in enumerate(["3b", "7b"])
    ]
    folders.append(make_run(tmp_path / "none", "grpo", 2, model=None, beta=0.0))
    folders.append(make_run(tmp_path / "none_too", "grpo", 3, model=None, beta=0.2))
    labels = labels_of(*folders)
    assert list(labels.values()) == [1, 1, 1, 1]
    names = [label.split("model=")[1] for label in labels]
    assert names == ["runs/3b/checkpoint-500", "runs/7b/checkpoint-500", "None", "None"]


def test_a_setting_that_no_label_can_show_still_keeps_runs_apart(tmp_path):
    """An older run has no such flag, and a flag that is on is not named."""
    a = make_run(tmp_path / "old", "mine", 0)
    b = make_run(tmp_path / "new", "mine", 1, gradient_noise=True)
    assert labels_of(a, b) == {f"mine ({a})": 1, f"mine ({b})": 1}


def test_two_scripts_of_one_name_and_seed_are_told_apart_by_their_folders(tmp_path):
    folders = []
    for version in ("first", "second"):
        for seed in (0, 1):
            folder = make_run(tmp_path / f"{version}_{seed}", "mine", seed)
            Path(folder, "mine.py").write_text(f"# the {version} version\n")
            folders.append(folder)
    expected = {f"mine ({tmp_path}/first)": 2, f"mine ({tmp_path}/second)": 2}
    assert labels_of(*folders) == expected
    pack_runs.main([str(tmp_path / "packed.jsonl"), *folders])
    packed = labels_of(tmp_path / "packed.jsonl")
    assert list(packed.values()) == [2, 2] and "first" in list(packed)[0]


def test_a_seed_met_twice_is_not_a_second_seed(tmp_path):
    a = make_run(tmp_path / "a", "mine", 0)
    b = make_run(tmp_path / "b", "mine", 0)
    other = Path(b, "metrics.jsonl").read_text().replace('"loss": 0.', '"loss": 5.')
    Path(b, "metrics.jsonl").write_text(other)  # on another machine
    assert labels_of(a, b) == {f"mine ({a})": 1, f"mine ({b})": 1}


def test_two_seeds_without_any_reward_are_two_seeds(tmp_path):
    """Fault: where nothing is ever right, rewards and losses are equal, and a seed is refused."""
    folders = [make_run(tmp_path / name, "grpo", seed) for seed, name in enumerate("ab")]
    for seed, folder in enumerate(folders):
        path = Path(folder, "metrics.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        stalled = {"reward": 0.0, "loss": 0.0, "entropy": 1.0 + seed}
        lines = [x | stalled if "reward" in x else x for x in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert labels_of(*folders) == {"grpo": 2}


def damaged(folder, file, text):
    Path(folder, file).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("file, text", [
    ("config.json", "null"), ("config.json", '{"script": null}'), ("config.json", '"script"'),
    ("config.json", "[" * 100_000), ("metrics.jsonl", '{"reward": 1.0}'),
    ("metrics.jsonl", '{"step": "1", "reward": 1.0}'),
    ("metrics.jsonl", '{"step": 1, "reward": "high"}'),
])  # fmt: skip
def test_a_damaged_run_is_named_in_a_sentence(tmp_path, file, text):
    """Fault: a null or a text where a number should be ends in a traceback."""
    folder = damaged(make_run(tmp_path / "broken"), file, text)
    for command in "curves", "lengths", "map":
        with pytest.raises(BadInput, match="broken"):
            run(command, folder)


def test_evaluations_without_responses_have_no_lengths(tmp_path):
    folder = make_run(tmp_path / "a")
    for step in {line["step"] for line in analysis.read_logs([folder])[0].evals}:
        damaged(folder, f"eval-{step}.jsonl", "")
    with pytest.raises(BadInput, match="none of the runs"):
        run("lengths", folder)


def test_the_same_numbers_are_refused_as_a_second_seed(tmp_path):
    a = make_run(tmp_path / "a", "grpo", 0)
    b = make_run(tmp_path / "b", "grpo", 1)
    with pytest.raises(BadInput, match="the same numbers"):
        run("curves", a, a)
    lines = Path(a, "metrics.jsonl").read_text().splitlines()
    lines = [json.dumps(json.loads(line) | {"seconds_update": 1.5}) for line in lines]
    Path(b, "metrics.jsonl").write_text("\n".join(lines) + "\n")  # the times differ
    with pytest.raises(BadInput, match=f"{a} and {b} hold the same numbers"):
        run("curves", a, b)


def test_scripts_of_ones_own_get_colours_of_their_own():
    colours = analysis.choose_colours(["my_rgra", "grpo", "my_raft", "grpo G=4"])
    assert len(set(colours.values())) == 4
    assert colours["grpo"] == analysis.choose_colours(["grpo"])["grpo"]


def test_evaluations_of_another_set_are_never_mixed_with_the_runs_own(tmp_path):
    lengths = [([5], [6]), ([5], [6])]
    a = make_run(tmp_path / "a", "grpo", 0, lengths=lengths)
    expected = drawn(run("curves", a)[1])
    line = {"step": 2, "eval_accuracy": 0.9, "eval_reward": 0.9, "eval_dataset": "math500"}
    with open(Path(a, "metrics.jsonl"), "a") as file:
        file.write(json.dumps(line) + "\n")
    (table, *_), figure = run("curves", a)
    assert drawn(figure) == expected and 0.9 not in table[2][0]
    assert analysis.read_folder(a).lines[-1] == line  # without the lengths of eval-2.jsonl


# --- what is drawn ---
def test_a_curve_is_the_mean_over_seeds_and_the_band_one_standard_deviation(tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "SMOOTH", 2)
    accuracies = [(0.4, 0.5, 0.8), (0.2, 0.7, 0.9), (0.3, 0.3, 0.4)]
    folders = [make_run(tmp_path / f"{i}", seed=i, accuracies=a) for i, a in enumerate(accuracies)]
    (table, *_), figure = run("curves", *folders, "--keys", "eval_accuracy,reward")
    (line, band), (rewards, _) = drawn(figure)
    mean = np.mean(accuracies, 0)
    deviation = np.std(accuracies, 0, ddof=1)
    assert np.allclose(line, np.stack([[0, 2, 4], mean], 1))
    edges = {(step, round(y, 9)) for step, y in band}
    for step, m, d in zip((0, 2, 4), mean, deviation):
        assert {(step, round(m - d, 9)), (step, round(m + d, 9))} <= edges
    assert np.allclose(rewards, [[1, 0.5], [2, 0.55], [3, 0.65], [4, 0.75]])
    (name, seeds, step, *numbers) = table[2][0]
    assert (name, seeds, step) == ("grpo", 3, 4)
    assert numbers == pytest.approx([0.3, 0.1, 0.7, deviation[-1], 12.0, 0.3, 0.2])


def test_any_logged_number_can_be_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "SMOOTH", 1)
    folder = make_run(tmp_path / "a")
    lines = [json.loads(text) for text in Path(folder, "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "reward" in line:
            line["my_metric"] = 10.0 * line["step"]
        else:
            line["eval_tools"] = 7.0 + line["step"]
    Path(folder, "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (table, *_), figure = run("curves", folder, "--keys", "my_metric, eval_tools")
    (mine,), (tools,) = drawn(figure)
    assert mine == [[1, 10], [2, 20]] and tools == [[0, 7], [2, 9]]
    assert table[1][-2:] == ["mean my_metric", "mean eval_tools"]
    assert table[2][0][-2:] == [15.0, 8.0]
    with pytest.raises(BadInput, match="'my_metrics'.*my_metric"):
        run("curves", folder, "--keys", "reward,my_metrics")


def test_differences_follow_the_numbers(tmp_path):
    for name, gap in ("better", 0.3), ("worse", -0.3):
        folders = []
        for seed in range(4):
            noise = seed / 100
            folders.append(make_run(tmp_path / name / f"a{seed}", "grpo", seed, (0.4, 0.6 + noise)))
            mine = (0.4, 0.6 + gap + noise)
            folders.append(make_run(tmp_path / name / f"b{seed}", "sign_grpo", seed, mine))
        tables, _ = run("curves", *folders)
        p = pytest.approx(2 / 70)
        assert tables[1][2] == [["sign_grpo", "grpo", f"{100 * gap:+.1f}", p, p]]
        tables, _ = run("curves", *folders, "--against", "sign_grpo")
        assert tables[1][2][0][:3] == ["grpo", "sign_grpo", f"{-100 * gap:+.1f}"]


def test_only_runs_with_the_same_common_flags_are_compared(tmp_path):
    folders = []
    runs = {"a": ("grpo", {}), "b": ("ep_grpo", {"λ": 0.1}), "c": ("ep_grpo", {"λ": 0.0})}
    for name, (script, flags) in runs.items():
        folders += [make_run(tmp_path / f"{name}{seed}", script, seed, **flags) for seed in (0, 1)]
    folders += [make_run(tmp_path / f"d{seed}", "ep_grpo", seed, group_size=4) for seed in (0, 1)]
    tables, _ = run("curves", *folders)
    assert [row[:2] for row in tables[1][2]] == [
        ["ep_grpo G=8 λ=0.1", "grpo G=8"],
        ["ep_grpo G=8 λ=0.0", "grpo G=8"],
    ]
    lines = Path(folders[0], "metrics.jsonl").read_text().splitlines()
    Path(folders[0], "metrics.jsonl").write_text("\n".join(lines[:-1]))
    assert len(run("curves", *folders)[0]) == 1  # one was only evaluated before training


def test_permutation_p_by_hand():
    apart = analysis.permutation_p([1, 2, 3], [10, 11, 12])
    assert apart == pytest.approx(2 / 20)  # this split and its mirror
    assert analysis.permutation_p([1.0], [1.0]) == 1
    assert analysis.permutation_p([0, 0, 0, 0, 1], [2, 3, 4, 5, 6]) == pytest.approx(2 / 252)


def test_runs_without_a_step_and_other_files_are_skipped(tmp_path, capsys):
    a = make_run(tmp_path / "a")
    empty = make_run(tmp_path / "empty", accuracies=(0.4,))
    (tmp_path / "picture.png").touch()
    (tmp_path / "words").mkdir()
    with open(Path(a, "metrics.jsonl"), "a") as file:
        file.write('{"step": 3, "rew')  # a run that is still writing
    assert labels_of(*sorted(tmp_path.iterdir())) == {"grpo": 1}
    said = capsys.readouterr().err
    assert f"{empty} has no training step yet, skipped" in said
    assert "words is not a run's folder, skipped" in said and "picture" not in said


# --- lengths ---
def test_lengths_of_right_and_wrong_responses_by_hand(tmp_path):
    base = ([10, 10], [4, 4, 20, 20])
    folders = [
        make_run(tmp_path / "a", "grpo", 0, lengths=[base, ([12], [20, 30, 40])]),
        make_run(tmp_path / "b", "grpo", 1, lengths=[base, ([14, 16], [10, 20])]),
    ]
    (table,), figure = run("lengths", *folders)
    caption, _, rows = table
    assert "Long: over 11 tokens" in caption  # the base's mean length is 68 / 6
    assert rows == [["grpo", 2, 0, 10.0, 0.0, 12.0, 0.5], ["grpo", 2, 2, 13.5, 1.0, 22.5, 0.75]]
    (right, _), (wrong, _), (long, _) = drawn(figure)
    assert right == [[0, 10], [2, 13.5]] and wrong == [[0, 12], [2, 22.5]]
    assert long == [[0, 0.5], [2, 0.75]]
    packed = tmp_path / "packed.jsonl"
    pack_runs.main([str(packed), *folders])
    (again,), figure_again = run("lengths", packed)
    assert again == table and drawn(figure_again) == drawn(figure)


def test_lengths_skips_what_has_none(tmp_path, capsys):
    a = make_run(tmp_path / "a", lengths=[([5], []), ([5], [])])  # never wrong
    b = make_run(tmp_path / "b", seed=1)
    (table,), _ = run("lengths", a, b)
    assert table[2][-1] == ["grpo", 1, 2, 5.0, 0.0, None, None]
    assert f"{b} has no evaluation that recorded lengths, skipped" in capsys.readouterr().err
    with pytest.raises(BadInput, match="none of the runs can be used"):
        run("lengths", b)


# --- map ---
def test_map_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "SMOOTH", 2)
    runs = {
        "slow": ("grpo", 2, "weak", (0.02, 0.1, 0.3)),
        "fast": ("grpo", 2, "weak", (0.04, 0.2, 0.3)),
        "lost": ("sign_grpo", 2, "weak", (0.03, 0.2, 0.0)),
        "more": ("grpo", 16, "weak", (0.03, 0.4, 0.5)),
        "good": ("grpo", 2, "strong", (0.40, 0.8, 0.7)),
    }
    folders = [
        make_run(tmp_path / name, script, seed, accuracies, group_size=G, model=model)
        for seed, (name, (script, G, model, accuracies)) in enumerate(runs.items())
    ]
    slow = Path(folders[0], "metrics.jsonl")
    lines = [json.loads(text) for text in slow.read_text().splitlines()]
    rewards = iter([0.0, 0.2, 0.0, 0.4])  # in twos: 0, 0.1, 0.1, 0.2
    lines = [x | {"reward": next(rewards)} if "reward" in x else x for x in lines]
    slow.write_text("\n".join(map(json.dumps, lines)))
    (table,), figure = run("map", *folders)
    gap = pytest.approx(0.1)
    share = pytest.approx(0.3)
    assert table[2] == [
        ["weak (3.0 %), G = 2", "grpo", 2, pytest.approx(0.3), 2.5, 0.0, gap, share],
        ["weak (3.0 %), G = 2", "sign_grpo", 1, 0.0, None, 1.0, gap, share],
        ["weak (3.0 %), G = 16", "grpo", 1, 0.5, 1.0, 0.0, gap, share],
        ["strong (40.0 %), G = 2", "grpo", 1, 0.7, 1.0, 0.0, gap, share],
    ]
    assert [axis.get_title() for axis in figure.axes] == list(analysis.MAP_PANELS.values())
    cells = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(cells) == ["0.00", "0.30", "0.50", "0.70"]


def test_map_keeps_equal_bases_and_other_settings_apart(tmp_path, capsys):
    folders = [
        make_run(tmp_path / "a", seed=0, model="one"),
        make_run(tmp_path / "b", seed=1, model="two"),
        make_run(tmp_path / "c", seed=2, model="two", learning_rate=1e-3),
        make_run(tmp_path / "d", seed=3, model="two", learning_rate=1e-4),
    ]
    late = make_run(tmp_path / "late", seed=4, accuracies=(0.4, 0.5))
    lines = Path(late, "metrics.jsonl").read_text().splitlines()
    Path(late, "metrics.jsonl").write_text("\n".join(lines[1:]))
    (table,), _ = run("map", *folders, late)
    assert [row[:3] for row in table[2]] == [
        ["one (40.0 %), G = 8", "grpo", 1],
        ["two (40.0 %), G = 8", "grpo", 1],
        ["two (40.0 %), G = 8", "grpo lr=0.001", 1],
        ["two (40.0 %), G = 8", "grpo lr=0.0001", 1],
    ]
    assert f"{late} was not evaluated at step 0 and later, skipped" in capsys.readouterr().err


def test_additions_by_hand(tmp_path, capsys):
    lines = [
        {"question": "2+5+0=", "samples": [r"2+5=7;7+0=7;\boxed{7}", r"1+2+3=6;\boxed{80}"]},
        {"question": "9+9=", "samples": [r"9+9=17;\boxed{17}", r"12+9=21;1+9=10;\boxed{18}"]},
    ]
    rewards = [[1, 0], [0, 1]]
    lines = [line | {"rewards": reward} for line, reward in zip(lines, rewards)]
    # 2 of 4 responses earn the reward, 3 of 4 have enough steps, 4 of 5 additions are right.
    assert count_additions.describe(lines) == (0.5, 0.75, 0.8)
    (tmp_path / "eval-0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    count_additions.main([str(tmp_path)])
    assert f"| {tmp_path.name} | 0 | 0.50 | 0.75 | 0.80 |" in capsys.readouterr().out


def test_a_packed_log_can_hold_the_additions(tmp_path, capsys):
    folder = Path(make_run(tmp_path / "a"))
    steps = [line["step"] for line in analysis.read_logs([folder])[0].evals]
    for step in steps:
        line = {"question": "1+1=", "samples": ["1+1=2", "\\boxed{2}"]}
        line |= {"rewards": [step, 3 * step], "lengths": [5, 5]}
        (folder / f"eval-{step}.jsonl").write_text(json.dumps(line) + "\n")
    packed = tmp_path / "packed.jsonl"
    flags = ["--keys", "eval_accuracy", "--additions", "--problems"]
    pack_runs.main([str(packed), str(folder), *flags])
    evals = analysis.read_packed(packed)[0].evals
    assert [line["problem_rewards"] for line in evals] == [[2 * step] for step in steps]
    assert [line["boxed"] for line in evals] == [0.5] * len(steps)
    count_additions.main([str(packed)])
    expected = [f"| a | {step} | {min(step, 1):.2f} | 0.00 | 1.00 |" for step in steps]
    assert capsys.readouterr().out.splitlines()[-len(steps) :] == expected
    (folder / "eval-0-eval_samples-32.jsonl").write_text("another evaluation")
    count_additions.main([str(folder)])
    assert capsys.readouterr().out.splitlines()[-len(steps) :] == expected
    pack_runs.main([str(packed), str(folder)])
    with pytest.raises(BadInput, match="was packed without --additions"):
        count_additions.main([str(packed)])


# --- packed logs ---
def test_a_packed_log_can_be_cut_to_some_numbers(tmp_path):
    folder = make_run(tmp_path / "a")
    with open(Path(folder, "metrics.jsonl"), "a") as file:
        file.write('{"step": 2, "eval_accuracy": 0.9, "eval_dataset": "math500"}\n')
    packed = tmp_path / "packed.jsonl"
    keys = ["reward", "degenerate_frac", "degenerate_iid", "eval_accuracy"]
    pack_runs.main([str(packed), folder, "--keys", *keys])
    (head, *lines) = map(json.loads, packed.read_text().splitlines())
    assert head["config"]["script"] == "grpo"
    assert all(line.keys() <= {"run", "step", "eval_dataset", *keys} for line in lines)
    assert run("map", packed)[0][0][2] == run("map", folder)[0][0][2]


def test_packed_logs_draw_the_same_numbers_as_folders(tmp_path):
    folders = []
    for script in ("grpo", "mine"):
        for seed in (0, 1):
            folder = make_run(tmp_path / "runs" / f"{script}_s{seed}", script, seed)
            folders.append(folder)
    packed = tmp_path / "packed.jsonl"
    pack_runs.main([str(packed), *folders])
    tables, figure = run("curves", *folders)
    again, figure_again = run("curves", packed)
    assert again == tables and drawn(figure_again) == drawn(figure)
    some = run("curves", packed, "--only", "mine_*")
    assert drawn(some[1]) == drawn(run("curves", *folders[2:])[1])


def test_packing_loses_no_line_and_refuses_equal_names(tmp_path):
    folder = make_run(tmp_path / "x" / "a", lengths=[([1], [2]), ([1], [2, 2])])
    with open(Path(folder, "metrics.jsonl"), "a") as file:
        file.write('{"step": 2, "eval_accuracy": 0.9, "eval_dataset": "math500"}\n')
    packed = tmp_path / "packed.jsonl"
    pack_runs.main([str(packed), folder])
    lines = [json.loads(text) for text in packed.read_text().splitlines()]
    assert lines[0] == {"run": "a", "config": json.loads(Path(folder, "config.json").read_text())}
    original = [json.loads(x) for x in Path(folder, "metrics.jsonl").read_text().splitlines()]
    original[0] |= {"lengths_right": [[1, 1]], "lengths_wrong": [[2, 1]]}
    original[3] |= {"lengths_right": [[1, 1]], "lengths_wrong": [[2, 2]]}
    assert lines[1:] == [{"run": "a"} | line for line in original]
    with pytest.raises(BadInput, match="two of the folders are called a"):
        pack_runs.main([str(packed), folder, make_run(tmp_path / "y" / "a")])


@pytest.mark.parametrize("path", sorted((ROOT / "docs/runs").glob("*.jsonl")), ids=lambda p: p.stem)
def test_the_logs_in_docs_can_be_drawn(path):
    logs = analysis.read_packed(path)
    assert logs and all(log.train and log.evals for log in logs)
    (table, *_), figure = run("curves", path)
    assert sum(row[1] for row in table[2]) == len(logs)
    assert all(line.get_ydata().size for line in figure.axes[0].lines)


# --- the command line ---
@pytest.mark.parametrize(
    "command, message",
    [
        ("curves nowhere", "nowhere does not exist"),
        ("curves nowhere.jsonl", "cannot read nowhere.jsonl"),
        ("curves {tmp}/broken.jsonl", "broken.jsonl: line 2 belongs to none of the packed runs"),
        ("curves {tmp}/broken", "cannot read .*broken/metrics.jsonl"),
        ("curves {tmp}/other", "other does not name its script"),
        ("curves {tmp}/good --only nothing*", "check --only"),
        ("curves {tmp}/good --keys my_metric", "--keys: no run has logged a number 'my_metric'"),
        ("lengths {tmp}/lengths", "cannot read rewards and lengths in .*eval-0.jsonl"),
    ],
)
def test_bad_input_is_named(command, message, tmp_path):
    make_run(tmp_path / "good")
    make_run(tmp_path / "lengths")
    (tmp_path / "lengths/eval-0.jsonl").write_text('{"rewards": [1, 0], "lengths": [3]}\n')
    make_run(tmp_path / "broken")
    (tmp_path / "broken/metrics.jsonl").write_text('{"step": 0,}\n')
    make_run(tmp_path / "other")
    (tmp_path / "other/config.json").write_text('{"model_type": "qwen2"}')
    head = '{"run": "a", "config": {"script": "grpo"}}\n'
    (tmp_path / "broken.jsonl").write_text(head + '{"step": 1}\n')
    with pytest.raises(BadInput, match=message):
        run(*command.format(tmp=tmp_path).split())


def test_a_picture_that_cannot_be_written_is_named(tmp_path):
    folder = make_run(tmp_path / "a")
    for output in (tmp_path / "picture.unknown", "/proc/nowhere/picture.png"):
        with pytest.raises(BadInput, match="cannot write --output"):
            analysis.main(["curves", folder, "--output", str(output)])


def test_a_command_prints_a_table_its_claim_and_the_picture(tmp_path, capsys):
    folder = make_run(tmp_path / "a")
    analysis.main(["curves", folder, "--output", str(tmp_path / "new" / "one")])
    printed = capsys.readouterr().out
    assert "| grpo | 1 | 2 | 0.400 | – | 0.500 | – | 12.000 | 0.300 | 0.200 |" in printed
    assert "Claims: the sign baseline" in printed
    assert printed.endswith(f"Picture: {tmp_path}/new/one.png\n")
    assert (tmp_path / "new/one.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path):
    command = [sys.executable, str(ROOT / "analysis.py"), "curves", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: nowhere does not exist") and done.stderr.count("\n") == 1
