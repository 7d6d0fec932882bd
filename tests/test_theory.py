"""What the papers prove, checked on policies so small that every outcome can be written down.

Each test states a claim in words and where it comes from. It then enumerates all groups of G responses that the policy
could draw, hands them to the project's own functions as one large batch, and weighs each group by its probability: an
exact expectation, with no sampling noise. Read it as an introduction: a claim, the smallest case, the numbers.

Sources, by the short names below:
    GRPO          DeepSeekMath, arXiv:2402.03300
    Dr. GRPO      Understanding R1-Zero-Like Training, arXiv:2503.20783
    Foundations   On the Policy Gradient Foundations of Group Relative Policy Optimization, arXiv:2606.29238
    Sign          the paper on gradient starvation of the group mean and the fixed-reference advantage A = 2r - 1
    Length        the paper on the impossibility of unbiasedness (P1) together with length invariance (P2)
    EP-GRPO       Entropy-Progress Aligned GRPO
    PPO           Proximal Policy Optimization Algorithms, arXiv:1707.06347
    k3            Schulman, Approximating KL Divergence, joschu.net/blog/kl-approx
"""

import itertools
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
    """With float64 rewards, and float64 as torch's default for 1 / L, the scripts' functions compute in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --- every group that could be drawn ---

THETA = [0.3, -0.5, 1.0, 0.2]  # logits of a policy with four responses of one token each
BINARY = [0.0, 1.0, 0.0, 1.0]  # their rewards


def one_token_policy(theta):
    """The policy's parameters, and its log-probs with their mask: one row a response, here of one token."""
    theta = torch.tensor(theta, requires_grad=True)
    return theta, theta.log_softmax(0)[:, None], torch.ones(len(theta), 1, dtype=torch.bool)


def policy_with_success_rate(p):
    """Three responses, the first of them right, with probability p; the wrong ones share the rest one to two."""
    return torch.tensor([p, (1 - p) / 3, 2 * (1 - p) / 3]).log().tolist(), [1.0, 0.0, 0.0]


def every_group(script, logps, mask, rewards, G):
    """All N^G groups of N responses, as the prompts of one batch; each row's response; each group's probability."""
    groups = torch.tensor(list(itertools.product(range(len(logps)), repeat=G)))  # (P, G)
    rows = groups.flatten()  # (B,)
    response_chance = logps.detach().masked_fill(~mask, 0.0).sum(1).exp()  # (N,)
    return script.Batch(torch.tensor(rewards)[groups], mask[rows]), rows, response_chance[groups].prod(1)


def expected_ascent(script, theta, logps, mask, rewards, G, only=None, weight=None, **flags):
    """Where the script's first step goes in expectation: minus the gradient of its loss, over all groups.

    `only` keeps some of the groups, by their rewards (P, G); `weight` replaces compute_weights."""
    args = script.Args(max_new_tokens=mask.shape[1], **flags)
    batch, rows, chance = every_group(script, logps, mask, rewards, G)
    if only:
        chance = torch.where(only(batch.rewards), chance, 0.0)
    advantages = script.compute_advantages(batch, args)
    weights = (weight or script.compute_weights)(batch, args)
    # The weights hold a 1 / P: an average over the groups as if all were as likely. They are not.
    weights = weights * (len(chance) * chance).repeat_interleave(G)[:, None]
    drawn = logps[rows]
    loss, _ = script.policy_loss(drawn, drawn.detach(), None, advantages, weights, args)
    return -torch.cat([x.flatten() for x in torch.autograd.grad(loss, theta, retain_graph=True)])


def gradient(value, theta):
    return torch.cat([x.flatten() for x in torch.autograd.grad(value, theta, retain_graph=True)])


def expected_reward(logps, mask, rewards):
    return (logps.masked_fill(~mask, 0.0).sum(1).exp() * torch.tensor(rewards)).sum()


def angle(a, b):
    """In degrees."""
    return torch.rad2deg(torch.arccos((a @ b / a.norm() / b.norm()).clamp(-1, 1))).item()


# --- the group mean as a baseline ---


@pytest.mark.parametrize("rewards", [BINARY, [0.2, -1.0, 3.0, 0.5]], ids=["binary", "graded"])
@pytest.mark.parametrize("G", [2, 3, 4, 5])
def test_group_mean_is_unbiased_up_to_1_minus_1_over_G(G, rewards):
    """Claim (Dr. GRPO; Foundations): centred by the group's mean, without the std, the expected gradient is the true
    policy gradient times 1 - 1/G.

    Why not the true one itself: a response is part of the mean that it is compared with, by 1/G."""
    theta, logps, mask = one_token_policy(THETA)
    true = gradient(expected_reward(logps, mask, rewards), theta)
    assert_close(expected_ascent(dr_grpo, theta, logps, mask, rewards, G), (1 - 1 / G) * true)


def std_factor(p, G):
    """What dividing by the std multiplies a prompt's gradient by: a sum over k, the number of right responses."""
    total = 0.0
    for k in range(1, G):
        chance = comb(G, k) * p**k * (1 - p) ** (G - k)
        std = sqrt(k * (G - k) / G / (G - 1))
        total += chance * k * (G - k) / G**2 / (std + 1e-4)
    return total / (p * (1 - p))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("G", [2, 4, 7])
def test_std_multiplies_a_prompt_by_a_factor_of_its_success_rate(G, p):
    """Claim (Dr. GRPO's difficulty bias; Foundations): with the std, each prompt's expected gradient still points along
    its own true gradient, but times a factor that depends on its success rate p."""
    theta, rewards = policy_with_success_rate(p)
    theta, logps, mask = one_token_policy(theta)
    true = gradient(expected_reward(logps, mask, rewards), theta)
    assert_close(expected_ascent(grpo, theta, logps, mask, rewards, G), std_factor(p, G) * true)


def test_std_factor_is_least_at_one_half():
    """The last claim goes on: the factor is no constant. Prompts that are nearly always right or wrong count more, and
    the larger the group the more they do: towards 1 / sqrt(p (1 - p)), where the std is known exactly."""
    rates = (0.5, 0.3, 0.1, 0.03)
    for G in (7, 16, 64):
        factors = [std_factor(p, G) for p in rates]
        assert factors == sorted(factors) and factors[-1] > 1.2 * factors[0]
    for p in rates:  # seven responses can be enumerated: 3^7 groups, and the factor read off grpo.py itself
        theta, rewards = policy_with_success_rate(p)
        theta, logps, mask = one_token_policy(theta)
        true = gradient(expected_reward(logps, mask, rewards), theta)
        measured = (expected_ascent(grpo, theta, logps, mask, rewards, 7).norm() / true.norm()).item()
        assert measured == pytest.approx(std_factor(p, 7))
    for p in rates:
        assert std_factor(p, 500) == pytest.approx(1 / sqrt(p * (1 - p)), rel=0.06)


def test_with_std_the_sum_over_prompts_leaves_the_gradient_of_mean_accuracy():
    """Claim (Dr. GRPO): over prompts of different difficulty the std turns the step away from the gradient of mean
    accuracy. Here two prompts are right in 3 % and 50 % of cases, G = 8: the angle is 8.3 degrees. Without it, 0."""
    G, skill = 8, torch.zeros(2, requires_grad=True)
    # Two skills. The hard prompt's logit of the right response rests on the first, the other's on the second.
    logits = torch.stack([5 * skill[0] + torch.tensor(0.03 / 0.97).log(), skill[1]])
    true, with_std, without = torch.zeros(3, 2)
    for logit in logits:
        logps = torch.stack([logit, -logit]).sigmoid().log()[:, None]  # right, wrong
        mask, rewards = torch.ones(2, 1, dtype=torch.bool), [1.0, 0.0]
        true += gradient(expected_reward(logps, mask, rewards), [skill]) / 2
        with_std += expected_ascent(grpo, [skill], logps, mask, rewards, G) / 2
        without += expected_ascent(dr_grpo, [skill], logps, mask, rewards, G) / 2
    assert angle(without, true) < 1e-4
    assert angle(with_std, true) == pytest.approx(8.3, abs=0.1)


# --- binary rewards: what a group can say ---


@pytest.mark.parametrize("G", [2, 5, 8])
def test_binary_rewards_give_two_advantages(G):
    """Claim (GRPO with rewards of 0 and 1; Foundations): with a share q of right responses in the group, the right ones
    get sqrt((1 - q) / q) and the wrong ones -sqrt(q / (1 - q)), both times sqrt(1 - 1/G), as the std has ddof 1."""
    for k in range(1, G):
        batch = grpo.Batch(torch.tensor([[1.0] * k + [0.0] * (G - k)]), torch.ones(G, 1, dtype=torch.bool))
        q = k / G
        right, wrong = sqrt((1 - q) / q) * sqrt(1 - 1 / G), -sqrt(q / (1 - q)) * sqrt(1 - 1 / G)
        expected = torch.tensor([right] * k + [wrong] * (G - k))[:, None]
        # The 1e-4 beside the std takes off a little: less than 1 part in 2,000.
        assert_close(grpo.compute_advantages(batch, grpo.Args()), expected, rtol=5e-4, atol=0)


def test_a_groups_gradient_is_right_minus_wrong():
    """Claim (Foundations: advantages that sum to zero leave little rank): a group's gradient is a multiple of
    (mean score of the right responses) - (mean score of the wrong ones), a score being the gradient of a log-prob.

    In the basis of these two means all groups of a prompt are multiples of (1, -1): a matrix of rank one."""
    G, args = 4, grpo.Args(max_new_tokens=1)
    theta, logps, mask = one_token_policy(THETA)
    scores = torch.stack([gradient(logp, theta) for logp in logps[:, 0]])  # (4, 4), one row a response
    coordinates = []
    for group in itertools.product(range(4), repeat=G):
        rows = torch.tensor(group)
        batch = grpo.Batch(torch.tensor(BINARY)[rows][None], mask[rows])
        advantages, weights = grpo.compute_advantages(batch, args), grpo.compute_weights(batch, args)
        drawn = logps[rows]
        loss, _ = grpo.policy_loss(drawn, drawn.detach(), None, advantages, weights, args)
        ours, right = -gradient(loss, theta), batch.rewards[0] == 1
        k = right.sum().item()
        if k in (0, G):
            assert not advantages.any() and not ours.any()  # a degenerate group: exactly 0
            continue
        factor = k * (G - k) / G**2 / (batch.rewards.std() + 1e-4)
        assert_close(ours, factor * (scores[rows][right].mean(0) - scores[rows][~right].mean(0)))
        per_response = -torch.autograd.grad(loss, drawn, retain_graph=True)[0][:, 0]  # (G,)
        coordinates.append(torch.stack([per_response[right].sum(), per_response[~right].sum()]))
    assert len(coordinates) == 4**4 - 2 * 2**4
    assert torch.linalg.matrix_rank(torch.stack(coordinates), atol=1e-9) == 1


# --- groups that say nothing ---


def silent_chance(p, G):
    """The probability that a group's advantages are all 0, over all 2^G ways in which its responses can be judged."""
    rewards = torch.tensor(list(itertools.product([0.0, 1.0], repeat=G)))  # (2^G, G)
    advantages = grpo.compute_advantages(grpo.Batch(rewards, torch.ones(rewards.numel(), 1, dtype=torch.bool)), None)
    silent = ~advantages.view(-1, G).any(1)  # (2^G,)
    return (torch.where(rewards == 1, p, 1 - p).prod(1) * silent).sum().item()


SPREADS = [  # success rates of the prompts, each as likely
    [0.0, 1.0], [0.1, 0.9], [0.5, 0.6], [0.0, 0.0, 0.3], [0.05, 0.1, 0.2, 0.7, 0.95],
]  # fmt: skip


@pytest.mark.parametrize("G", [2, 3, 8])
def test_groups_without_signal_are_more_than_the_mean_success_rate_predicts(G):
    """Claim (Sign): the share of degenerate groups, E[p^G + (1-p)^G], is at least what the mean success rate m gives,
    m^G + (1-m)^G, by Jensen's inequality; equal only when all prompts have the same p."""
    for rates in SPREADS:
        share = sum(silent_chance(p, G) for p in rates) / len(rates)
        assert share == pytest.approx(sum(p**G + (1 - p) ** G for p in rates) / len(rates))
        mean = sum(rates) / len(rates)
        assert share > mean**G + (1 - mean) ** G + 1e-6
    for p in (0.0, 0.2, 0.5, 1.0):
        assert silent_chance(p, G) == pytest.approx(p**G + (1 - p) ** G)


def test_groups_without_signal_sampled():
    """The same claim, as a run would meet it: 20,000 groups drawn, `degenerate_frac` above `degenerate_iid`."""
    draws, G = torch.Generator().manual_seed(0), 4
    rates = torch.tensor(SPREADS[-1])[torch.randint(5, (20_000, 1), generator=draws)]  # (P, 1)
    rewards = (torch.rand(20_000, G, generator=draws) < rates).double()
    advantages = grpo.compute_advantages(grpo.Batch(rewards, torch.ones(rewards.numel(), 1, dtype=torch.bool)), None)
    share = (~advantages.view(-1, G).any(1)).double().mean().item()
    exact = sum(p**G + (1 - p) ** G for p in SPREADS[-1]) / 5
    p = rewards.mean().item()
    assert share == pytest.approx(exact, abs=4 * sqrt(exact * (1 - exact) / 20_000))  # four standard errors
    assert share > 3 * (p**G + (1 - p) ** G)


# --- the fixed reference of sign_grpo.py ---


@pytest.mark.parametrize("G", [1, 2, 3, 5])
def test_sign_in_all_wrong_groups_is_the_gradient_of_pass_at_G(G):
    """Claim (Sign, "pass@G failure descent"): restricted to groups in which all are wrong, the expected gradient with
    A = 2r - 1 is the gradient of pass@G = 1 - (1-p)^G, the chance that at least one of G is right.

    Exactly so for the sum over the group; the loss takes the mean, hence the G."""
    theta, logps, mask = one_token_policy(THETA)
    p = expected_reward(logps, mask, BINARY)

    def all_wrong(rewards):
        return (rewards == 0).all(1)

    ours = G * expected_ascent(sign_grpo, theta, logps, mask, BINARY, G, only=all_wrong)
    assert_close(ours, gradient(1 - (1 - p) ** G, theta))
    assert ours.norm() > 0.01
    if G > 1:
        assert not expected_ascent(grpo, theta, logps, mask, BINARY, G, only=all_wrong).any()  # GRPO learns nothing


@pytest.mark.parametrize("G", [1, 2, 3, 5])
def test_sign_in_all_right_groups_is_the_mirror_image(G):
    """Claim (Sign, mirrored): in groups in which all are right it is the gradient of p^G, the chance that none of G is
    wrong. GRPO's is 0 there too."""
    theta, logps, mask = one_token_policy(THETA)
    p = expected_reward(logps, mask, BINARY)

    def all_right(rewards):
        return (rewards == 1).all(1)

    ours = G * expected_ascent(sign_grpo, theta, logps, mask, BINARY, G, only=all_right)
    assert_close(ours, gradient(p**G, theta))
    if G > 1:
        assert not expected_ascent(grpo, theta, logps, mask, BINARY, G, only=all_right).any()


def test_sign_over_all_groups_is_twice_the_true_gradient():
    """A consequence: a constant reference is a baseline that no response is part of, so there is no 1 - 1/G. The price
    is variance: even where nothing can be learned (all responses right) single groups push."""
    theta, logps, mask = one_token_policy(THETA)
    true = gradient(expected_reward(logps, mask, BINARY), theta)
    for G in (1, 3):
        assert_close(expected_ascent(sign_grpo, theta, logps, mask, BINARY, G), 2 * true)
    assert expected_ascent(sign_grpo, theta, logps, mask, [1.0] * 4, 2).abs().max() < 1e-12
    batch = sign_grpo.Batch(torch.ones(1, 2), torch.ones(2, 1, dtype=torch.bool))
    assert sign_grpo.compute_advantages(batch, None).all()


# --- length ---

C = 3  # the longest response


def two_length_policy():
    """Four first tokens. After two of them the response ends; after the others two more tokens come, of two kinds each.

    Ten responses, two of length 1 and eight of length 3, rewards of 0 and 1 in both."""
    logits = [0.4, -0.3, 0.1, 0.6], [0.5, -0.2], [0.9, 0.0]  # of the first, the second and the third token
    first, second, third = (torch.tensor(x, requires_grad=True) for x in logits)
    responses = [(0,), (1,), *itertools.product((2, 3), (0, 1), (0, 1))]
    positions = [x.log_softmax(0) for x in (first, second, third)]
    zero = torch.zeros(())
    logps = [[positions[t][y[t]] if t < len(y) else zero for t in range(C)] for y in responses]
    logps = torch.stack([torch.stack(row) for row in logps])  # (N, C)
    mask = torch.arange(C) < torch.tensor([len(y) for y in responses])[:, None]
    return [first, second, third], logps, mask, [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]


def contributions(weight_function, args=None):
    """How much a short and a long response count in a group of both: the sums of their tokens' weights."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    return weight_function(length_alpha.Batch(torch.zeros(1, 2), mask), args).sum(1)


def test_alpha_1_is_unbiased_and_long_responses_count_more():
    """Claim (Length, P1 without P2; Dr. GRPO): with a constant weight for every token the gradient is the true one,
    times (1 - 1/G) / C; a response of three times the length counts three times as much."""
    theta, logps, mask, rewards = two_length_policy()
    true = gradient(expected_reward(logps, mask, rewards), theta)
    for G in (2, 3):
        ours = expected_ascent(length_alpha, theta, logps, mask, rewards, G, alpha=1.0)
        assert_close(ours, (1 - 1 / G) / C * true)
    short, long = contributions(length_alpha.compute_weights, length_alpha.Args(alpha=1.0, max_new_tokens=C))
    assert_close(long, 3 * short)


def test_alpha_0_counts_all_responses_alike_and_is_biased():
    """Claim (Length, P2 without P1; Dr. GRPO's response-level length bias): with 1 / L each response counts the same,
    and the step leaves the direction of the true gradient."""
    theta, logps, mask, rewards = two_length_policy()
    true = gradient(expected_reward(logps, mask, rewards), theta)
    assert angle(expected_ascent(length_alpha, theta, logps, mask, rewards, 2, alpha=0.0), true) > 5
    short, long = contributions(length_alpha.compute_weights, length_alpha.Args(alpha=0.0, max_new_tokens=C))
    assert_close(long, short)


def test_between_both_are_violated_each_less():
    """Claim (Length, the spectrum L^(alpha - 1)): from alpha = 0 to 1 the bias falls and the dominance of long
    responses grows, as L^alpha."""
    theta, logps, mask, rewards = two_length_policy()
    true = gradient(expected_reward(logps, mask, rewards), theta)
    angles, ratios = [], []
    for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
        angles.append(angle(expected_ascent(length_alpha, theta, logps, mask, rewards, 2, alpha=alpha), true))
        short, long = contributions(length_alpha.compute_weights, length_alpha.Args(alpha=alpha, max_new_tokens=C))
        ratios.append((long / short).item())
        assert ratios[-1] == pytest.approx(3**alpha)
    assert angles == sorted(angles, reverse=True) and ratios == sorted(ratios)
    assert angles[-1] < 1e-4 and angles[-2] > 1 and ratios[0] == pytest.approx(1) and ratios[1] > 1.3


def test_no_weight_by_length_is_unbiased_and_length_invariant():
    """Claim (Length, the impossibility theorem): no weight w(L) is both unbiased and length invariant.

    The expected gradient is linear in the weights, w(1) g1 + w(3) g3: g1 comes of the tokens of short responses, g3 of
    those of long ones. The true gradient is along g1 + g3. As g1 and g3 are not parallel, unbiased means w(1) = w(3).
    Length invariant means 1 w(1) = 3 w(3). For each pair of weights below we see which of the two it breaks."""
    theta, logps, mask, rewards = two_length_policy()
    true = gradient(expected_reward(logps, mask, rewards), theta)

    def by_length(short, long):
        def weight(batch, args):
            lengths = batch.mask.sum(1, keepdim=True)
            return batch.mask * torch.where(lengths == 1, short, long) / len(batch.mask)

        return weight

    def ascent(short, long):
        return expected_ascent(dr_grpo, theta, logps, mask, rewards, 2, weight=by_length(short, long))

    g1, g3 = ascent(1.0, 0.0), ascent(0.0, 1.0)
    assert_close(g1 + g3, (1 - 1 / 2) * true)
    assert 10 < angle(g1, g3) < 170  # not parallel
    for short, long in itertools.product([1.0, 1 / 2, 1 / 3, 0.1], repeat=2):
        assert_close(ascent(short, long), short * g1 + long * g3)
        unbiased = angle(short * g1 + long * g3, true) < 1e-4
        counts = contributions(by_length(short, long))
        invariant = bool((counts[0] - counts[1]).abs() < 1e-9)
        assert unbiased == (short == long)
        assert invariant == (abs(short - 3 * long) < 1e-9)
        assert not (unbiased and invariant)


# --- EP-GRPO ---


def ep_batch(P=2, G=3, T=6, seed=0):
    """A rollout of a policy that has moved from its reference: rewards differ in one group, are equal in the next."""
    draws = torch.Generator().manual_seed(seed)
    mask = torch.arange(T) < torch.randint(2, T + 1, (P * G, 1), generator=draws)
    rewards = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    old_logps = -2 * torch.rand(P * G, T, generator=draws)
    ref_logps = old_logps + 0.5 * torch.randn(P * G, T, generator=draws)
    return ep_grpo.Batch(rewards, mask, None, None, old_logps, ref_logps, torch.rand(P * G, T, generator=draws))


def progress_ascent(batch, args):
    """Minus the gradient, in the log-probs, of what the progress term adds to the loss."""
    none = ep_grpo.Args(**{**vars(args), "progress_weight": 0.0})
    logps = batch.old_logps.clone().requires_grad_()
    weights = ep_grpo.compute_weights(batch, args)
    losses = [ep_grpo.policy_loss(logps, batch.old_logps, None, ep_grpo.compute_advantages(batch, x), weights, x)[0]
              for x in (args, none)]
    return -torch.autograd.grad(losses[0] - losses[1], logps)[0], weights


ANCHOR = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, -1.0])[:, None]  # of ep_batch: right up, wrong down


def test_progress_term_is_the_gradient_of_a_squared_log_ratio():
    """Claim (EP-GRPO's theorem: its gradient is that of GRPO plus a squared log-ratio), in the form that our code has:
    with the z-score replaced by the identity, the progress term's gradient is that of
    1/2 lambda sum W d (log pi - log pi_ref)^2. A right response (d = 1) is driven away from the reference, on the side
    where it stands; a wrong one (d = -1) back to it.

    Where the log-ratios of a bucket have mean 0 and spread 1 - 1e-3, our z = (Delta - mean) / (spread + 1e-3) is the
    identity: so we arrange them."""
    batch, args = ep_batch(), ep_grpo.Args(buckets=1, progress_weight=0.3)
    delta = batch.old_logps - batch.ref_logps
    for rows in (slice(0, 3), slice(3, 6)):  # one bucket a group
        tokens = delta[rows][batch.mask[rows]]
        delta[rows] = (delta[rows] - tokens.mean()) / tokens.std(correction=0) * (1 - 1e-3)
    batch.ref_logps = batch.old_logps - delta
    ours, weights = progress_ascent(batch, args)

    logps = batch.old_logps.clone().requires_grad_()
    squared = 0.5 * args.progress_weight * (weights * ANCHOR * (logps - batch.ref_logps) ** 2).sum()
    assert_close(ours, gradient(squared, logps).view_as(ours), rtol=0, atol=1e-7)  # advantages are float32
    assert ours.abs().max() > 0.01


def test_progress_term_is_a_regulariser_weighed_by_precision():
    """The same with the z-score as it is: the square is taken around the bucket's mean and divided by its spread, both
    constants to the gradient. Where log-ratios spread less, the same distance counts more ("precision-guided")."""
    batch, args = ep_batch(seed=1), ep_grpo.Args(buckets=1, progress_weight=0.3)
    ours, weights = progress_ascent(batch, args)
    delta = batch.old_logps - batch.ref_logps
    center, spread = torch.zeros(2, 6, 1)
    for rows in (slice(0, 3), slice(3, 6)):
        tokens = delta[rows][batch.mask[rows]]
        center[rows], spread[rows] = tokens.mean(), tokens.std(correction=0)
    logps = batch.old_logps.clone().requires_grad_()
    apart = logps - batch.ref_logps - center
    squared = 0.5 * args.progress_weight * (weights * ANCHOR * apart**2 / (spread + 1e-3)).sum()
    assert_close(ours, gradient(squared, logps).view_as(ours), rtol=0, atol=1e-7)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 10.0])
def test_gate_keeps_the_sign_of_every_tokens_outcome_advantage(gamma):
    """Claim (EP-GRPO, entropy-guided modulation "preserves the original direction"): the gate changes how much a token
    counts, never whether it is pushed up or down. Tokens of more entropy count more."""
    batch, args = ep_batch(), ep_grpo.Args(gate_sharpness=gamma, progress_weight=0.0)
    gated, plain = ep_grpo.compute_advantages(batch, args), grpo.compute_advantages(batch, grpo.Args())
    assert torch.equal(gated.sign(), plain.float().sign())
    gate = (gated / plain)[:3][batch.mask[:3]]  # the group whose rewards differ
    assert ((0 < gate) & (gate < 1)).all()
    order = batch.entropies[:3][batch.mask[:3]].argsort()
    assert (gate[order].diff() >= 0).all() and gate[order[-1]] > gate[order[0]]


def test_polarity_flips_with_the_outcome():
    """Claim (EP-GRPO, anchored progress): a log-ratio has no direction of its own, the outcome gives it one. Right made
    wrong and wrong made right turn every token's advantage around, also in a group whose rewards are equal, where the
    anchor falls back to the reward itself. There GRPO is silent and EP-GRPO is not."""
    batch = ep_batch()
    args = ep_grpo.Args(entropy_gate=False)
    before = ep_grpo.compute_advantages(batch, args)
    batch.rewards = 1 - batch.rewards
    assert_close(ep_grpo.compute_advantages(batch, args), -before)
    assert before[3:].any() and not grpo.compute_advantages(batch, grpo.Args())[3:].any()
    # Two tokens of one bucket are pushed apart, whichever way: the z-scores of a bucket sum to 0.
    alone = ep_grpo.compute_advantages(batch, ep_grpo.Args(buckets=1))[3:]
    assert abs(alone.sum()) < 1e-6 and (alone > 0).any() and (alone < 0).any()


def buckets_of(entropies, K, pads=0):
    """The bucket that compute_advantages puts each token of a response into, read from outside.

    The response's partner in the group is a ruler: K tokens, one in the middle of each bucket, and one to end on. Raise
    the log-ratio of one ruler token: the tokens whose advantage moves are those in its bucket."""
    ruler = torch.tensor([0.5] + [1.0] * (K - 1) + [0.5])
    lengths = torch.tensor([len(entropies), len(ruler)])[:, None]
    T = lengths.max() + pads
    mask = torch.arange(T) < lengths
    both = torch.full((2, T), torch.nan)
    both[0, : len(entropies)], both[1, : len(ruler)] = entropies, ruler
    args = ep_grpo.Args(buckets=K, entropy_gate=False, progress_weight=1.0)
    still = torch.where(mask, 0.0, torch.nan)
    batch = ep_grpo.Batch(torch.tensor([[1.0, 0.0]]), mask, None, None, still, still, both)
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
    """Claim (EP-GRPO, logical progress): tau_t, the share of a response's entropy spent after t tokens, never decreases
    and ends at 1. The buckets, floor(K tau), inherit it: they rise to the last one. Tokens without entropy, wherever
    they stand, are no progress."""
    entropies = torch.rand(20, generator=torch.Generator().manual_seed(0))
    entropies[[3, 4, 5, 11]] = 0.0
    buckets = buckets_of(entropies, K)
    assert (buckets.diff() >= 0).all() and buckets[-1] == K - 1
    assert len(buckets[2:6].unique()) == 1  # the three tokens without entropy stay where the one before them was
    progress = entropies.cumsum(0) / entropies.sum()
    assert torch.equal(buckets, (K * progress).floor().long().clamp(max=K - 1))


def test_buckets_do_not_move_when_pads_are_appended():
    """Claim (EP-GRPO, asynchronous trajectories): progress is measured along the response itself, so neither pads nor a
    longer neighbour shift it; and a response without any entropy stays in the first bucket."""
    for entropies in (torch.rand(9, generator=torch.Generator().manual_seed(1)), torch.ones(5), torch.zeros(4)):
        assert torch.equal(buckets_of(entropies, 8), buckets_of(entropies, 8, pads=20))
    assert not buckets_of(torch.zeros(4), 8).any()


# --- the loss that all five share ---


@pytest.mark.parametrize("ratio, advantage, objective, slope", [
    (0.5, +1.0, 0.5, 0.5),  # too rare already and good: nothing stops it from rising
    (1.0, +1.0, 1.0, 1.0),  # the first step: plain policy gradient
    (1.5, +1.0, 1.2, 0.0),  # good, and raised enough: no further
    (0.5, -1.0, -0.8, 0.0),  # bad, and lowered enough: no further
    (1.0, -1.0, -1.0, -1.0),
    (1.5, -1.0, -1.5, -1.5),  # bad and risen: nothing stops it from falling
])  # fmt: skip
def test_clipping(ratio, advantage, objective, slope):
    """Claim (PPO): min(rho A, clip(rho, 0.8, 1.2) A) is a lower bound that takes away the gradient only where the ratio
    has already gone far in the direction that the advantage asks for. Slopes are in log pi."""
    logp = torch.tensor([[ratio]]).log().requires_grad_()
    A, W = torch.tensor([[advantage]]), torch.ones(1, 1)
    loss, _ = grpo.policy_loss(logp, torch.zeros(1, 1), None, A, W, grpo.Args(clip_low=0.2, clip_high=0.2))
    assert -loss.item() == pytest.approx(objective)
    assert -torch.autograd.grad(loss, logp)[0].item() == pytest.approx(slope)
    assert -loss.item() <= ratio * advantage + 1e-12


def kl_penalty(logps, ref_logps, weights):
    """policy_loss without advantages and with beta = 1: sum W k3."""
    logps, ref_logps, weights = (x[:, None] for x in (logps, ref_logps, weights))
    nothing = torch.zeros_like(weights)
    return grpo.policy_loss(logps, logps.detach(), ref_logps, nothing, weights, grpo.Args(beta=1.0))[0]


def test_k3_is_never_negative_and_its_mean_is_the_kl():
    """Claim (k3; GRPO, equation 4): k3 = exp(ref - logp) - (ref - logp) - 1 is at least 0 for every token, and its
    expectation under the policy is KL(policy || reference). With the ratio upside down it would not be."""
    policy, reference = torch.tensor(THETA).log_softmax(0), torch.tensor([1.0, 0.0, -1.0, 0.5]).log_softmax(0)
    for token in torch.eye(4):
        assert kl_penalty(policy, reference, token) > 0
        assert kl_penalty(policy, policy, token) == 0
    kl = (policy.exp() * (policy - reference)).sum()
    assert_close(kl_penalty(policy, reference, policy.exp()), kl)
    upside_down = (policy.exp() * ((policy - reference).exp() - (policy - reference) - 1)).sum()
    assert abs(upside_down - kl) > 0.1


def test_k3_as_a_loss_pulls_along_the_other_kl():
    """Claim (noted in "Rethinking KL Regularization in RLHF: From Value Estimation to Gradient Optimization"): an
    estimator's mean and its gradient are two things. On the first step, with the tokens drawn and held fixed, the
    gradient of k3 is that of KL(reference || policy), not of the KL(policy || reference) that its value estimates. Both
    are 0 only where the two agree. Multiplying k3 by the ratio would give the other (some trainers do)."""
    theta = torch.tensor(THETA, requires_grad=True)
    policy, reference = theta.log_softmax(0), torch.tensor([1.0, 0.0, -1.0, 0.5]).log_softmax(0)
    ours = gradient(kl_penalty(policy, reference, policy.detach().exp()), theta)
    forward, reverse = ((p.exp() * (p - q)).sum() for p, q in ((reference, policy), (policy, reference)))
    assert_close(ours, gradient(forward, theta))
    assert (ours - gradient(reverse, theta)).norm() > 0.1
