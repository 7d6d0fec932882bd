"""What the papers prove, checked on policies so small that every outcome can be written down.

Each test states a claim in words and where it comes from. It enumerates all groups of G responses
that the policy could sample, hands them to the scripts' own functions as one large batch, and
weights each group by its probability: an exact expectation, without sampling noise. Read it as an
introduction: a claim, the smallest case, the numbers.

Sources, by the short names below:
    GRPO          DeepSeekMath, arXiv:2402.03300
    Dr. GRPO      Understanding R1-Zero-Like Training, arXiv:2503.20783
    Foundations   On the Policy Gradient Foundations of Group Relative Policy Optimization,
                  arXiv:2606.29238
    Sign          Gradient Starvation in Binary-Reward GRPO, arXiv:2605.07689
    Length        On the Impossibility of Unbiased and Length-Invariant Policy Optimization with
                  Outcome Rewards, viXra:2605.0117
    EP-GRPO       Entropy-Progress Aligned GRPO, arXiv:2605.04960
    PPO           Proximal Policy Optimization Algorithms, arXiv:1707.06347
    k3            Schulman, Approximating KL Divergence, joschu.net/blog/kl-approx
"""

import itertools
from dataclasses import replace
from math import comb, sqrt

import pytest
import torch
from torch.testing import assert_close

import dr_grpo
import ep_grpo
import grpo
import length_alpha
import sign_grpo


@pytest.fixture(autouse=True)
def float64():
    """With float64 rewards and as torch's default, the scripts' functions compute in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --- every group that could be sampled ---
THETA = [0.3, -0.5, 1.0, 0.2]  # logits of a policy with four responses of one token each
BINARY = [0.0, 1.0, 0.0, 1.0]  # their rewards


def one_token_policy(theta):
    """The policy's parameters, log-probs and mask: one row per response, of one token."""
    theta = torch.tensor(theta, requires_grad=True)
    return theta, theta.log_softmax(0)[:, None], torch.ones(len(theta), 1, dtype=torch.bool)


def policy_with_success_rate(p):
    """Three responses: a right one of probability p, and two wrong ones."""
    return torch.tensor([p, (1 - p) / 3, 2 * (1 - p) / 3]).log().tolist(), [1.0, 0.0, 0.0]


def one_token_batch(script, rewards):
    """A rollout with the given rewards, (P, G), of responses of one token."""
    rewards = torch.as_tensor(rewards)
    mask = torch.ones(rewards.numel(), 1, dtype=torch.bool)
    return script.Batch(rewards=rewards, mask=mask)


def every_group(script, logps, mask, rewards, G):
    """All N^G groups of N responses as one batch; each row's response; each group's probability."""
    groups = torch.tensor(list(itertools.product(range(len(logps)), repeat=G)))  # (P, G)
    rows = groups.flatten()  # (B,)
    chance = logps.detach().masked_fill(~mask, 0.0).sum(1).exp()  # (N,) of a response
    batch = script.Batch(rewards=torch.tensor(rewards)[groups], mask=mask[rows])
    return batch, rows, chance[groups].prod(1)


def loss_of(script, logps, batch, weights, args):
    """The script's loss at its first step, where these are the log-probs of the sampled tokens."""
    advantages = script.compute_advantages(batch, args)
    return script.policy_loss(
        logps, logps.detach(), None, advantages, weights, batch.mask, args)[0]


def expected_ascent(script, theta, logps, mask, rewards, G, only=None, weight=None, **flags):
    """Where the script's first step goes in expectation: minus its loss' gradient, over all groups.

    only keeps some of the groups, by their rewards (P, G); weight replaces compute_weights.
    """
    args = script.Args(max_new_tokens=mask.shape[1], **flags)
    batch, rows, chance = every_group(script, logps, mask, rewards, G)
    if only is not None:
        chance = torch.where(only(batch.rewards), chance, 0.0)
    weights = (weight or script.compute_weights)(batch, args)
    # The weights hold a 1 / P: an average over groups as if all were equally likely. They are not.
    weights = weights * (len(chance) * chance).repeat_interleave(G)[:, None]
    return -gradient(loss_of(script, logps[rows], batch, weights, args), theta)


def gradient(value, theta):
    """As one vector; theta is a tensor or a list of tensors."""
    gradients = torch.autograd.grad(value, theta, retain_graph=True)
    return torch.cat([x.flatten() for x in gradients])


def expected_reward(logps, mask, rewards):
    return (logps.masked_fill(~mask, 0.0).sum(1).exp() * torch.tensor(rewards)).sum()


def angle(a, b):
    """In degrees."""
    return torch.rad2deg(torch.arccos((a @ b / a.norm() / b.norm()).clamp(-1, 1))).item()


# --- the group mean as a baseline ---
@pytest.mark.parametrize("rewards", [BINARY, [0.2, -1.0, 3.0, 0.5]], ids=["binary", "graded"])
@pytest.mark.parametrize("G", [2, 3, 4, 5])
def test_group_mean_is_unbiased_up_to_1_minus_1_over_G(G, rewards):
    """Claim (Dr. GRPO; Foundations): centred by the group's mean, without the std, the expected
    gradient is the true policy gradient times 1 - 1/G.

    Why not the true one itself: a response is part of the mean it is compared with, by 1/G.
    """
    theta, logps, mask = one_token_policy(THETA)
    true = gradient(expected_reward(logps, mask, rewards), theta)
    ours = expected_ascent(dr_grpo, theta, logps, mask, rewards, G)
    assert_close(ours, (1 - 1 / G) * true)


def std_factor(p, G):
    """What dividing by the std multiplies a prompt's gradient by.

    A sum over k, the number of right responses in the group.
    """
    total = 0.0
    for k in range(1, G):
        chance = comb(G, k) * p**k * (1 - p) ** (G - k)
        std = sqrt(k * (G - k) / G / (G - 1))
        total += chance * k * (G - k) / G**2 / (std + 1e-4)
    return total / (p * (1 - p))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("G", [2, 4, 7])
def test_std_multiplies_a_prompt_by_a_factor_of_its_success_rate(G, p):
    """Claim (Dr. GRPO's difficulty bias; Foundations): with the std, each prompt's expected
    gradient still points along its own true gradient, but times a factor that depends on its
    success rate p."""
    theta, rewards = policy_with_success_rate(p)
    theta, logps, mask = one_token_policy(theta)
    true = gradient(expected_reward(logps, mask, rewards), theta)
    ours = expected_ascent(grpo, theta, logps, mask, rewards, G)
    assert_close(ours, std_factor(p, G) * true)


def test_std_factor_is_least_at_one_half():
    """The last claim continued: the factor is not constant. Prompts that are nearly always right
    or wrong count more, and the larger the group the more they do: towards 1 / sqrt(p (1 - p)),
    where the std is known exactly."""
    rates = (0.5, 0.3, 0.1, 0.03)
    for G in (7, 16, 64):
        factors = [std_factor(p, G) for p in rates]
        assert factors == sorted(factors)
        assert factors[-1] > 1.2 * factors[0]
    for p in rates:  # groups of seven can be enumerated, 3^7 of them: the factor of grpo.py itself
        theta, rewards = policy_with_success_rate(p)
        theta, logps, mask = one_token_policy(theta)
        true = gradient(expected_reward(logps, mask, rewards), theta)
        ours = expected_ascent(grpo, theta, logps, mask, rewards, 7)
        assert (ours.norm() / true.norm()).item() == pytest.approx(std_factor(p, 7))
    for p in rates:
        assert std_factor(p, 500) == pytest.approx(1 / sqrt(p * (1 - p)), rel=0.06)


def test_with_std_the_sum_over_prompts_leaves_the_gradient_of_mean_accuracy():
    """Claim (Dr. GRPO): over prompts of different difficulty, the std turns the step away from the
    gradient of mean accuracy. Here two prompts are right in 3 % and 50 % of cases, with G = 8: the
    angle is 8.3 degrees. Without the std it is 0."""
    G = 8
    skill = torch.zeros(2, requires_grad=True)
    # The hard prompt's logit of the right response rests on the first skill, the other's on the
    # second.
    logits = torch.stack([5 * skill[0] + torch.tensor(0.03 / 0.97).log(), skill[1]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    rewards = [1.0, 0.0]
    true = torch.zeros(2)
    with_std = torch.zeros(2)
    without = torch.zeros(2)
    for logit in logits:
        logps = torch.stack([logit, -logit]).sigmoid().log()[:, None]  # right, wrong
        true += gradient(expected_reward(logps, mask, rewards), [skill]) / 2
        with_std += expected_ascent(grpo, [skill], logps, mask, rewards, G) / 2
        without += expected_ascent(dr_grpo, [skill], logps, mask, rewards, G) / 2
    assert angle(without, true) < 1e-4
    assert angle(with_std, true) == pytest.approx(8.3, abs=0.1)


# --- binary rewards: what a group can say ---
@pytest.mark.parametrize("G", [2, 5, 8])
def test_binary_rewards_give_two_advantages(G):
    """Claim (GRPO with rewards of 0 and 1; Foundations): with a share q of right responses in the
    group, right ones get sqrt((1 - q) / q) and wrong ones -sqrt(q / (1 - q)), both times
    sqrt(1 - 1/G), as the std has ddof 1."""
    for k in range(1, G):
        batch = one_token_batch(grpo, [[1.0] * k + [0.0] * (G - k)])
        q = k / G
        right = sqrt((1 - q) / q) * sqrt(1 - 1 / G)
        wrong = -sqrt(q / (1 - q)) * sqrt(1 - 1 / G)
        expected = torch.tensor([right] * k + [wrong] * (G - k))[:, None]
        # The 1e-4 beside the std takes off a little: less than 1 part in 2,000.
        assert_close(grpo.compute_advantages(batch, grpo.Args()), expected, rtol=5e-4, atol=0)


def test_a_groups_gradient_is_right_minus_wrong():
    """Claim (Foundations: advantages that sum to zero leave little rank): a group's gradient is a
    multiple of (mean score of the right responses) - (mean score of the wrong ones), a score being
    the gradient of a log-prob.

    In the basis of these two means all groups of a prompt are multiples of (1, -1): a matrix of
    rank one.
    """
    G = 4
    args = grpo.Args(max_new_tokens=1)
    theta, logps, mask = one_token_policy(THETA)
    scores = torch.stack([gradient(logp, theta) for logp in logps[:, 0]])  # (4, 4) a row each
    coordinates = []
    for group in itertools.product(range(4), repeat=G):
        rows = torch.tensor(group)
        batch = grpo.Batch(rewards=torch.tensor(BINARY)[rows][None], mask=mask[rows])
        sampled = logps[rows]
        loss = loss_of(grpo, sampled, batch, grpo.compute_weights(batch, args), args)
        ours = -gradient(loss, theta)
        right = batch.rewards[0] == 1
        k = right.sum().item()
        if k in (0, G):
            assert not ours.any()  # a zero-variance group: exactly 0
            continue
        factor = k * (G - k) / G**2 / (batch.rewards.std() + 1e-4)
        difference = scores[rows][right].mean(0) - scores[rows][~right].mean(0)
        assert_close(ours, factor * difference)
        per_response = -gradient(loss, sampled)  # (G,)
        coordinates.append(torch.stack([per_response[right].sum(), per_response[~right].sum()]))
    assert len(coordinates) == 4**4 - 2 * 2**4
    assert torch.linalg.matrix_rank(torch.stack(coordinates), atol=1e-9) == 1


# --- zero-variance groups ---
def silent(rewards):
    """Which groups, (P, G), have advantages that are all 0: (P,)."""
    advantages = grpo.compute_advantages(one_token_batch(grpo, rewards), grpo.Args())
    return ~advantages.view(rewards.shape).any(1)


def silent_chance(p, G):
    """Their probability, over all 2^G ways in which a group's responses can be right or wrong."""
    rewards = torch.tensor(list(itertools.product([0.0, 1.0], repeat=G)))  # (2^G, G)
    chance = torch.where(rewards == 1, p, 1 - p).prod(1)
    return (chance * silent(rewards)).sum().item()


SPREADS = [  # success rates of prompts, each as likely
    [0.0, 1.0], [0.1, 0.9], [0.5, 0.6], [0.0, 0.0, 0.3], [0.05, 0.1, 0.2, 0.7, 0.95],
]  # fmt: skip


@pytest.mark.parametrize("G", [2, 3, 8])
def test_zero_variance_groups_are_more_than_the_mean_success_rate_predicts(G):
    """Claim (Sign): the share of zero-variance groups, E[p^G + (1-p)^G], is at least what the mean
    success rate m gives, m^G + (1-m)^G, by Jensen's inequality. They are equal only when all
    prompts have the same p."""
    for rates in SPREADS:
        share = sum(silent_chance(p, G) for p in rates) / len(rates)
        assert share == pytest.approx(sum(p**G + (1 - p) ** G for p in rates) / len(rates))
        mean = sum(rates) / len(rates)
        assert share > mean**G + (1 - mean) ** G + 1e-6
    for p in (0.0, 0.2, 0.5, 1.0):
        assert silent_chance(p, G) == pytest.approx(p**G + (1 - p) ** G)


def test_zero_variance_groups_sampled():
    """The same claim as a run meets it: 20,000 groups, degenerate_frac above degenerate_iid."""
    G = 4
    draws = torch.Generator().manual_seed(0)
    rates = torch.tensor(SPREADS[-1])[torch.randint(5, (20_000, 1), generator=draws)]  # (P, 1)
    rewards = (torch.rand(20_000, G, generator=draws) < rates).double()
    share = silent(rewards).double().mean().item()
    exact = sum(p**G + (1 - p) ** G for p in SPREADS[-1]) / 5
    p = rewards.mean().item()
    standard_error = sqrt(exact * (1 - exact) / 20_000)
    assert share == pytest.approx(exact, abs=4 * standard_error)
    assert share > 3 * (p**G + (1 - p) ** G)


# --- the constant baseline of sign_grpo.py ---
def all_wrong(rewards):
    return (rewards == 0).all(1)


def all_right(rewards):
    return (rewards == 1).all(1)


@pytest.mark.parametrize("G", [1, 2, 3, 5])
def test_sign_in_all_wrong_groups_is_the_gradient_of_pass_at_G(G):
    """Claim (Sign, "pass@G failure descent"): restricted to groups in which all are wrong, the
    expected gradient with A = 2r - 1 is the gradient of pass@G = 1 - (1-p)^G, the chance that at
    least one of G is right.

    Exactly so for the sum over the group; the loss takes the mean, hence the G.
    """
    theta, logps, mask = one_token_policy(THETA)
    p = expected_reward(logps, mask, BINARY)
    ours = G * expected_ascent(sign_grpo, theta, logps, mask, BINARY, G, only=all_wrong)
    assert_close(ours, gradient(1 - (1 - p) ** G, theta))
    assert ours.norm() > 0.01
    if G > 1:  # GRPO learns nothing from them
        assert not expected_ascent(grpo, theta, logps, mask, BINARY, G, only=all_wrong).any()


@pytest.mark.parametrize("G", [1, 2, 3, 5])
def test_sign_in_all_right_groups_is_the_mirror_image(G):
    """Claim (Sign, mirrored): in groups in which all are right it is the gradient of p^G, the
    chance that none of G is wrong. GRPO's is 0 there too."""
    theta, logps, mask = one_token_policy(THETA)
    p = expected_reward(logps, mask, BINARY)
    ours = G * expected_ascent(sign_grpo, theta, logps, mask, BINARY, G, only=all_right)
    assert_close(ours, gradient(p**G, theta))
    if G > 1:
        assert not expected_ascent(grpo, theta, logps, mask, BINARY, G, only=all_right).any()


def test_sign_over_all_groups_is_twice_the_true_gradient():
    """A consequence: no response is part of a constant baseline, so there is no 1 - 1/G. The price
    is variance: single groups push even where nothing can be learned, since all are right."""
    theta, logps, mask = one_token_policy(THETA)
    true = gradient(expected_reward(logps, mask, BINARY), theta)
    for G in (1, 3):
        ours = expected_ascent(sign_grpo, theta, logps, mask, BINARY, G)
        assert_close(ours, 2 * true)
    ours = expected_ascent(sign_grpo, theta, logps, mask, [1.0] * 4, 2)
    assert ours.abs().max() < 1e-12
    batch = one_token_batch(sign_grpo, torch.ones(1, 2))
    assert sign_grpo.compute_advantages(batch, sign_grpo.Args()).all()


# --- length ---
C = 3  # the longest response


def two_length_policy():
    """Two first tokens that end the response, and two after which two more tokens follow.

    Ten responses, two of length 1 and eight of length 3, with rewards of 0 and 1 in both.
    """
    # Of the first, the second and the third token.
    logits = [0.4, -0.3, 0.1, 0.6], [0.5, -0.2], [0.9, 0.0]
    theta = [torch.tensor(x, requires_grad=True) for x in logits]
    positions = [x.log_softmax(0) for x in theta]
    responses = [(0,), (1,), *itertools.product((2, 3), (0, 1), (0, 1))]
    zero = torch.zeros(())
    rows = []
    for y in responses:
        row = [positions[t][token] for t, token in enumerate(y)]
        rows.append(torch.stack(row + [zero] * (C - len(y))))
    mask = torch.arange(C) < torch.tensor([len(y) for y in responses])[:, None]
    return theta, torch.stack(rows), mask, [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]


def contributions(weight_function, args=None):
    """How much a short and a long response count in a batch of both: sums of their weights."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    return weight_function(length_alpha.Batch(mask=mask), args).sum(1)


def alpha_contributions(alpha):
    args = length_alpha.Args(alpha=alpha, max_new_tokens=C)
    return contributions(length_alpha.compute_weights, args)


def test_alpha_1_is_unbiased_and_long_responses_count_more():
    """Claim (Length, P1 without P2; Dr. GRPO): with a constant weight for every token the gradient
    is the true one, times (1 - 1/G) / C; a response of three times the length counts three times
    as much."""
    theta, logps, mask, rewards = two_length_policy()
    true = gradient(expected_reward(logps, mask, rewards), theta)
    for G in (2, 3):
        ours = expected_ascent(length_alpha, theta, logps, mask, rewards, G, alpha=1.0)
        assert_close(ours, (1 - 1 / G) / C * true)
    short, long = alpha_contributions(1.0)
    assert_close(long, 3 * short)


def test_alpha_0_counts_all_responses_alike_and_is_biased():
    """Claim (Length, P2 without P1; Dr. GRPO's response-level length bias): with 1 / L each
    response counts the same, and the step leaves the direction of the true gradient."""
    theta, logps, mask, rewards = two_length_policy()
    true = gradient(expected_reward(logps, mask, rewards), theta)
    ours = expected_ascent(length_alpha, theta, logps, mask, rewards, 2, alpha=0.0)
    assert angle(ours, true) > 5
    short, long = alpha_contributions(0.0)
    assert_close(long, short)


def test_between_both_are_violated_each_less():
    """Claim (Length, the spectrum L^(alpha - 1)): from alpha = 0 to 1 the bias falls and the
    dominance of long responses grows, as L^alpha."""
    theta, logps, mask, rewards = two_length_policy()
    true = gradient(expected_reward(logps, mask, rewards), theta)
    angles = []
    ratios = []
    for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
        ours = expected_ascent(length_alpha, theta, logps, mask, rewards, 2, alpha=alpha)
        angles.append(angle(ours, true))
        short, long = alpha_contributions(alpha)
        ratios.append((long / short).item())
        assert ratios[-1] == pytest.approx(3**alpha)
    assert angles == sorted(angles, reverse=True)
    assert angles[-1] < 1e-4
    assert angles[-2] > 1
    assert ratios == sorted(ratios)
    assert ratios[0] == pytest.approx(1)
    assert ratios[1] > 1.3


def by_length(short, long):
    """A weight function: short for responses of one token, long for the others."""

    def weight(batch, args):
        lengths = batch.mask.sum(1, keepdim=True)
        return batch.mask * torch.where(lengths == 1, short, long) / len(batch.mask)

    return weight


def test_no_weight_by_length_is_unbiased_and_length_invariant():
    """Claim (Length, the impossibility theorem): no weight w(L) is both unbiased and length
    invariant.

    The expected gradient is linear in the weights, w(1) g1 + w(3) g3: g1 comes from the tokens of
    short responses, g3 from those of long ones. The true gradient is along g1 + g3. As g1 and g3
    are not parallel, unbiased means w(1) = w(3). Length invariant means 1 w(1) = 3 w(3). For each
    pair of weights below we see which of the two it breaks.
    """
    theta, logps, mask, rewards = two_length_policy()
    true = gradient(expected_reward(logps, mask, rewards), theta)

    def ascent(short, long):
        weight = by_length(short, long)
        return expected_ascent(dr_grpo, theta, logps, mask, rewards, 2, weight=weight)

    g1 = ascent(1.0, 0.0)
    g3 = ascent(0.0, 1.0)
    assert_close(g1 + g3, (1 - 1 / 2) * true)
    assert 10 < angle(g1, g3) < 170  # not parallel
    for short, long in itertools.product([1.0, 1 / 2, 1 / 3, 0.1], repeat=2):
        assert_close(ascent(short, long), short * g1 + long * g3)
        unbiased = angle(short * g1 + long * g3, true) < 1e-4
        counts = contributions(by_length(short, long))
        invariant = (counts[0] - counts[1]).abs().item() < 1e-9
        assert unbiased == (short == long)
        assert invariant == (abs(short - 3 * long) < 1e-9)
        assert not (unbiased and invariant)


# --- EP-GRPO ---
GROUPS = (slice(0, 3), slice(3, 6))  # the rows of ep_batch's two groups


def ep_batch(P=2, G=3, T=6, seed=0):
    """A rollout of a policy that has moved away from its reference.

    Rewards differ in the first group and are equal in the second.
    """
    draws = torch.Generator().manual_seed(seed)
    mask = torch.arange(T) < torch.randint(2, T + 1, (P * G, 1), generator=draws)
    old_logps = -2 * torch.rand(P * G, T, generator=draws)
    ref_logps = old_logps + 0.5 * torch.randn(P * G, T, generator=draws)
    return ep_grpo.Batch(
        rewards=torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), mask=mask, old_logps=old_logps,
        ref_logps=ref_logps, entropies=torch.rand(P * G, T, generator=draws))


def progress_ascent(batch, args):
    """Minus the gradient, in the log-probs, of what the progress term adds to the loss; and W."""
    logps = batch.old_logps.clone().requires_grad_()
    weights = ep_grpo.compute_weights(batch, args)
    without = replace(args, progress_weight=0.0)
    added = loss_of(ep_grpo, logps, batch, weights, args)
    added = added - loss_of(ep_grpo, logps, batch, weights, without)
    return -gradient(added, logps).view_as(logps), weights


ANCHOR = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, -1.0])[:, None]  # of ep_batch: right is up


def test_progress_term_is_the_gradient_of_a_squared_log_ratio():
    """Claim (EP-GRPO's theorem: its gradient is that of GRPO plus a squared log-ratio), in the form
    that our code has: with the z-score replaced by the identity, the progress term's gradient is
    that of 1/2 lambda sum W d (log pi - log pi_ref)^2. A right response (d = 1) is driven away from
    the reference, to the side where it stands; a wrong one (d = -1) back to it.

    Where a bucket's log-ratios have mean 0 and spread 1 - 1e-3, our
    z = (Delta - mean) / (spread + 1e-3) is the identity: so we arrange them.
    """
    batch = ep_batch()
    args = ep_grpo.Args(buckets=1, progress_weight=0.3)
    delta = batch.old_logps - batch.ref_logps
    for rows in GROUPS:  # one bucket each
        tokens = delta[rows][batch.mask[rows]]
        delta[rows] = (delta[rows] - tokens.mean()) / tokens.std(correction=0) * (1 - 1e-3)
    batch.ref_logps = batch.old_logps - delta
    ours, weights = progress_ascent(batch, args)

    logps = batch.old_logps.clone().requires_grad_()
    squared = 0.5 * args.progress_weight * (weights * ANCHOR * (logps - batch.ref_logps) ** 2).sum()
    theirs = gradient(squared, logps).view_as(ours)
    assert_close(ours, theirs, rtol=0, atol=1e-7)  # advantages are float32
    assert ours.abs().max() > 0.01


def test_progress_term_is_a_regulariser_weighted_by_precision():
    """The same with the z-score as it is: the square is taken around the bucket's mean and divided
    by its spread, both constants to the gradient. Where log-ratios spread less, the same distance
    counts more ("precision-guided")."""
    batch = ep_batch(seed=1)
    args = ep_grpo.Args(buckets=1, progress_weight=0.3)
    ours, weights = progress_ascent(batch, args)
    delta = batch.old_logps - batch.ref_logps
    center = torch.zeros(6, 1)
    spread = torch.zeros(6, 1)
    for rows in GROUPS:
        tokens = delta[rows][batch.mask[rows]]
        center[rows] = tokens.mean()
        spread[rows] = tokens.std(correction=0)
    logps = batch.old_logps.clone().requires_grad_()
    distance = logps - batch.ref_logps - center
    squared = weights * ANCHOR * distance**2 / (spread + 1e-3)
    theirs = gradient(0.5 * args.progress_weight * squared.sum(), logps).view_as(ours)
    assert_close(ours, theirs, rtol=0, atol=1e-7)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 10.0])
def test_gate_keeps_the_sign_of_every_tokens_outcome_advantage(gamma):
    """Claim (EP-GRPO, entropy-guided modulation "preserves the original direction"): the gate
    changes how much a token counts, never whether it is pushed up or down. Tokens of more entropy
    count more."""
    batch = ep_batch()
    args = ep_grpo.Args(gate_sharpness=gamma, progress_weight=0.0)
    gated = ep_grpo.compute_advantages(batch, args)
    plain = grpo.compute_advantages(batch, grpo.Args())
    assert torch.equal(gated.sign(), plain.float().sign())
    gate = (gated / plain)[:3][batch.mask[:3]]  # the group whose rewards differ
    assert ((0 < gate) & (gate < 1)).all()
    order = batch.entropies[:3][batch.mask[:3]].argsort()
    assert (gate[order].diff() >= 0).all()
    assert gate[order[-1]] > gate[order[0]]


def test_polarity_flips_with_the_outcome():
    """Claim (EP-GRPO, anchored progress): a log-ratio has no direction of its own; the outcome
    gives it one. Right made wrong and wrong made right turn every token's advantage around, also in
    a group whose rewards are equal, where the anchor falls back to the reward itself. There GRPO is
    silent and EP-GRPO is not."""
    batch = ep_batch()
    args = ep_grpo.Args(entropy_gate=False)
    before = ep_grpo.compute_advantages(batch, args)
    batch.rewards = 1 - batch.rewards
    assert_close(ep_grpo.compute_advantages(batch, args), -before)
    assert before[3:].any()
    assert not grpo.compute_advantages(batch, grpo.Args())[3:].any()
    # Two tokens of one bucket are pushed apart, whichever way: a bucket's z-scores sum to 0.
    alone = ep_grpo.compute_advantages(batch, ep_grpo.Args(buckets=1))[3:]
    assert abs(alone.sum()) < 1e-6
    assert (alone > 0).any()
    assert (alone < 0).any()


def buckets_of(entropies, K, pads=0):
    """The bucket that compute_advantages puts each token of a response into, seen from outside.

    The response's partner in the group is a ruler: K tokens, one in the middle of each bucket, and
    a last one. Raise the log-ratio of one ruler token: the tokens whose advantage moves are those
    in its bucket.
    """
    ruler = torch.tensor([0.5] + [1.0] * (K - 1) + [0.5])
    lengths = torch.tensor([len(entropies), len(ruler)])[:, None]
    T = lengths.max() + pads
    mask = torch.arange(T) < lengths
    both = torch.full((2, T), torch.nan)
    both[0, : len(entropies)] = entropies
    both[1, : len(ruler)] = ruler
    args = ep_grpo.Args(buckets=K, entropy_gate=False, progress_weight=1.0)
    still = torch.where(mask, 0.0, torch.nan)
    batch = ep_grpo.Batch(
        rewards=torch.tensor([[1.0, 0.0]]), mask=mask, old_logps=still, ref_logps=still,
        entropies=both)
    rest = ep_grpo.compute_advantages(batch, args)
    buckets = torch.full((len(entropies),), -1)
    for k in range(K):
        batch.old_logps = still.clone()
        batch.old_logps[1, k] = 1.0
        moved = (ep_grpo.compute_advantages(batch, args) != rest)[0, : len(entropies)]
        assert (buckets[moved] == -1).all()  # in one bucket each
        buckets[moved] = k
    return buckets


@pytest.mark.parametrize("K", [4, 32])
def test_progress_never_decreases_and_ends_at_1(K):
    """Claim (EP-GRPO, logical progress): tau_t, the share of a response's entropy up to token t,
    never decreases and ends at 1. The buckets, floor(K tau), inherit it: they rise to the last one.
    Tokens without entropy, wherever they stand, are no progress."""
    entropies = torch.rand(20, generator=torch.Generator().manual_seed(0))
    entropies[[3, 4, 5, 11]] = 0.0
    buckets = buckets_of(entropies, K)
    assert (buckets.diff() >= 0).all()
    assert buckets[-1] == K - 1
    assert len(buckets[2:6].unique()) == 1  # three without entropy stay where the one before was
    progress = entropies.cumsum(0) / entropies.sum()
    assert torch.equal(buckets, (K * progress).floor().long().clamp(max=K - 1))


def test_buckets_do_not_move_when_pads_are_appended():
    """Claim (EP-GRPO, asynchronous trajectories): progress is measured along the response itself,
    so neither pads nor a longer neighbour shift it. A response without any entropy stays in the
    first bucket."""
    uneven = torch.rand(9, generator=torch.Generator().manual_seed(1))
    for entropies in (uneven, torch.ones(5), torch.zeros(4)):
        assert torch.equal(buckets_of(entropies, 8), buckets_of(entropies, 8, pads=20))
    assert not buckets_of(torch.zeros(4), 8).any()


# --- the loss that all five share ---
@pytest.mark.parametrize(
    "ratio, advantage, objective, slope",
    [
        (0.5, +1.0, 0.5, 0.5),  # good and too rare already: nothing stops it from rising
        (1.0, +1.0, 1.0, 1.0),  # the first step: plain policy gradient
        (1.5, +1.0, 1.2, 0.0),  # good and raised enough: no further
        (0.5, -1.0, -0.8, 0.0),  # bad and lowered enough: no further
        (1.0, -1.0, -1.0, -1.0),
        (1.5, -1.0, -1.5, -1.5),  # bad and risen: nothing stops it from falling
    ])
def test_clipping(ratio, advantage, objective, slope):
    """Claim (PPO): min(rho A, clip(rho, 0.8, 1.2) A) is a lower bound. It takes away the gradient
    only where the ratio has already gone far in the direction that the advantage asks for. Slopes
    are in log pi."""
    logp = torch.tensor([[ratio]]).log().requires_grad_()
    one = torch.ones(1, 1)
    args = grpo.Args(clip_low=0.2, clip_high=0.2)
    loss, _ = grpo.policy_loss(logp, 0 * one, None, advantage * one, one, one > 0, args)
    assert -loss.item() == pytest.approx(objective)
    assert -gradient(loss, logp).item() == pytest.approx(slope)
    assert -loss.item() <= ratio * advantage + 1e-12


def kl_penalty(logps, ref_logps, weights):
    """policy_loss without advantages and with beta = 1: sum W k3."""
    logps = logps[:, None]
    nothing = torch.zeros_like(logps)
    mask = torch.ones_like(logps, dtype=torch.bool)
    args = grpo.Args(beta=1.0)
    return grpo.policy_loss(
        logps, logps.detach(), ref_logps[:, None], nothing, weights[:, None], mask, args)[0]


REFERENCE = [1.0, 0.0, -1.0, 0.5]  # its logits


def test_k3_is_never_negative_and_its_mean_is_the_kl():
    """Claim (k3; GRPO, equation 4): k3 = exp(ref - logp) - (ref - logp) - 1 is at least 0 for every
    token, and its expectation under the policy is KL(policy || reference). With the ratio upside
    down it would not be."""
    policy = torch.tensor(THETA).log_softmax(0)
    reference = torch.tensor(REFERENCE).log_softmax(0)
    for token in torch.eye(4):
        assert kl_penalty(policy, reference, token) > 0
        assert kl_penalty(policy, policy, token) == 0
    difference = policy - reference
    kl = (policy.exp() * difference).sum()
    assert_close(kl_penalty(policy, reference, policy.exp()), kl)
    upside_down = (policy.exp() * (difference.exp() - difference - 1)).sum()
    assert abs(upside_down - kl) > 0.1


def test_k3_as_a_loss_pulls_along_the_other_kl():
    """Claim (noted in "Rethinking KL Regularization in RLHF: From Value Estimation to Gradient
    Optimization", arXiv:2510.01555): an estimator's mean and its gradient are two things. At the
    first step, with the tokens sampled and held fixed, the gradient of k3 is that of
    KL(reference || policy), not of the KL(policy || reference) that its value estimates. Both are 0
    only where the two agree. Multiplying k3 by the ratio would give the other (some trainers
    do)."""
    theta = torch.tensor(THETA, requires_grad=True)
    policy = theta.log_softmax(0)
    reference = torch.tensor(REFERENCE).log_softmax(0)
    ours = gradient(kl_penalty(policy, reference, policy.detach().exp()), theta)
    of_reference = (reference.exp() * (reference - policy)).sum()
    of_policy = (policy.exp() * (policy - reference)).sum()
    assert_close(ours, gradient(of_reference, theta))
    assert (ours - gradient(of_policy, theta)).norm() > 0.1
