"""The meaning of every metric of a run: the source of docs/metrics.md.

A name in <> stands for several metrics. The tests hold the list against the names in the code and
against what runs write.
"""

from __future__ import annotations

import re

METRICS: dict[str, str] = {
    # reward
    "reward/mean": "Mean reward of the step's trajectories that have one: the curve to look at.",
    "reward/std": "Standard deviation of those rewards. Near 0 every group tells the same, and a "
    "baseline of the group leaves no gradient.",
    "reward/<component>": "Mean of a reward component, `@reward` method or reward function, over "
    "the trajectories that report it, before its weight.",
    "reward/greedy_mean": "ReMax: mean reward of the greedy answers, the baseline.",
    "reward/unscored_fraction": "Trajectories of the batch that have no reward; they take no part "
    "in their group's baseline and have no gradient.",
    # rollout
    "rollout/trajectories": "Episodes that were dispatched, failed ones included.",
    "rollout/tokens": "Sampled tokens of the step.",
    "rollout/turns": "Turns per trajectory.",
    "rollout/tokens_per_trajectory": "Sampled tokens per trajectory. A steady rise without a rise "
    "of the reward is length explosion.",
    "rollout/tokens_per_s": "`agentrl rollout` and `eval`: sampled tokens per second.",
    "rollout/truncated_fraction": "Trajectories that a limit ended: turns, context or time, or the "
    "environment's own. High values hide the reward that a longer episode would have got.",
    "rollout/malformed_fraction": "Turns whose tool call could not be read.",
    "rollout/error_fraction": "Trajectories that failed and carry no gradient; `error/<code>` says "
    "of what.",
    "rollout/dropped_groups": "Groups that were played and are not trained on; `group/dropped/"
    "<reason>` says why.",
    "rollout/restarted_episodes": "Episodes that were played again because their environment "
    "server or process died.",
    "rollout/refused_calls": "Calls of agents that the endpoint refused, where there were any; the "
    "log has each reason once, and a trajectory's info its own.",
    "rollout/staleness_mean": "Steps by which the policy that sampled lags behind the one that is "
    "trained, mean over trained tokens.",
    "rollout/staleness_max": "The same, of the oldest trained token; never above "
    "`rollout.max_staleness`, but for groups that are trained on again.",
    "rollout/staleness_fraction/<steps>": "Fraction of trained tokens that are so many steps old.",
    "group/zero_variance_fraction": "Groups of the batch whose rewards are all equal: with a "
    "baseline of the group they have no gradient.",
    "group/dropped/<reason>": "Groups dropped for this reason: `zero_variance`, `single` or "
    "`unscored` (too few rewards to compare), `stale` (too old to train on; played again), "
    "`no_greedy_answer`, or what a filter of `rollout.keep` says.",
    "sampler/tasks": "Tasks of which a step has had a group; this and the next need a "
    "`rollout.sampler` other than `uniform`.",
    "sampler/repeated_fraction": "Groups of the step whose task had been played before.",
    "sampler/rate_mean": "Mean of all tasks' running pass rates.",
    "sampler/passed_fraction": "Tasks whose running pass rate is `rollout.sampler_passed` or more.",
    "sampler/stage": "`staged`: the newest pool that is open, from 0.",
    "replay/groups": "Groups of earlier steps that were trained on again (`rollout.replay_share`).",
    "replay/held": "Groups that are held for that, after the step took its own.",
    "replay/age_mean": "Steps since those groups were trained on first.",
    "error/<code>": "Trajectories that failed with this code, such as `step_timeout`, "
    "`grader_error` or `turn_timeout`.",
    "env/tool_calls": "Calls of tools per trajectory.",
    "env/tool_errors": "Of them, those in which the tool raised or ran out of time.",
    "env/<name>": "A metric of the environment, mean over trajectories with a reward.",
    "env/invalid_calls": "Calls that are unreadable, of an unknown tool, or with wrong arguments.",
    "env/unseen_tools": "Tools on offer that the first prompt does not name, as some chat "
    "templates leave them out; absent where there are none.",
    "env/<environment>/<metric>": "Of a run with several `[[env]]`: a metric of `reward/`, "
    "`rollout/`, `group/`, `sampler/`, `error/`, `env/`, `policy/`, `loss/`, `advantage/` or of "
    "the counts of `train/` over the episodes of this one alone. Its losses add up to the step's.",
    # the policy
    "policy/entropy": "Mean entropy of the policy at trained tokens, in nats. A fall to nearly 0 "
    "within a few steps is entropy collapse: groups stop to differ.",
    "policy/kl_old_new": "k3 estimate of the KL divergence from the policy before the step's "
    "updates to the live one, in nats. 0 with one update per batch.",
    "policy/kl_ref": "KL divergence from the reference policy, where the objective has one.",
    "policy/kl_coef": "Coefficient of that divergence; it moves where it is adaptive.",
    "policy/ratio_max": "Largest probability ratio of a trained token.",
    "policy/clip_fraction_high": "Trained tokens whose ratio is above the clip bound while their "
    "advantage is positive: they have no gradient.",
    "policy/clip_fraction_low": "Trained tokens whose ratio is below the clip bound while their "
    "advantage is negative: they have no gradient.",
    "policy/trained_fraction": "Tokens of the loss mask that no trust mask left out.",
    "policy/masked_<mask>": "Tokens that a mask of `objective.trust` left out.",
    "policy/off_policy_ratio_max": "Largest importance weight between trainer and sampler, before "
    "it is truncated.",
    "policy/off_policy_outside": "Tokens whose importance weight is outside "
    "`objective.off_policy.low` and `high`.",
    "policy/rollout_train_logprob_diff_max": "Largest difference between the log-probability that "
    "the sampler reported and the trainer's own of the policy before the update. Without staleness "
    "it is the disagreement of engine and trainer: about 1e-5 in float32, some 0.05 in bfloat16.",
    "policy/rollout_train_logprob_diff_mean": "Mean of the same.",
    "policy/fresh_diff_mean": "The same mean over turns that the newest policy sampled whole, and "
    "over all turns of the first update: what no staleness explains. The run stops on it, as on "
    "the next three (docs/precision.md).",
    "policy/fresh_diff_max": "Largest difference of a token of those turns.",
    "policy/fresh_diff_turn_max": "Largest mean difference of one of those turns.",
    "policy/fresh_diff_far": "Share of their tokens that differ by more than 2 nats.",
    "policy/ess": "Effective sample size of the importance weights between trainer and sampler, as "
    "a fraction of the tokens; 1 where both agree.",
    "policy/update_logprob_diff_max": "How far a trained token's log-probability has moved since "
    "the policy before the step's updates; 0 with one update per batch.",
    "policy/update_logprob_diff_mean": "Mean of the same.",
    # the loss
    "loss/policy": "The policy's loss. Its value says little: with one update per batch it is near "
    "0 by construction, whatever the gradient.",
    "loss/kl": "Penalty for leaving the reference policy, with its coefficient.",
    "loss/entropy": "Bonus for entropy, with its coefficient; negative where entropy is rewarded.",
    "loss/distill": "Distillation's share of the loss.",
    "loss/value": "The critic's loss.",
    "advantage/mean": "Mean advantage over trained tokens.",
    "advantage/abs_mean": "Mean size of an advantage.",
    "advantage/min": "Smallest advantage of a trained token.",
    "advantage/max": "Largest advantage of a trained token.",
    "advantage/zero_fraction": "Trained tokens with an advantage of exactly 0: they teach nothing. "
    "1.0 where all groups have equal rewards.",
    # updates
    "train/samples": "Token rows of the batch; a trajectory with a rewritten history has several.",
    "train/tokens": "Tokens of those rows, prompts and observations included.",
    "train/unrouted": "Samples of which the sampler did not say to which experts tokens went, so "
    "that the trainer's routers chose. With train.router_replay.",
    "train/packing": "How the model computes a micro-batch: 2 as one row in which what samples of "
    "a group begin with may stand once, 1 as one row, 0 one sample at a time (docs/models.md).",
    "train/tokens_per_s": "Tokens that the updates computed, per second of `time/train_s`. What "
    "rows of a group share and the model computes once counts once; every epoch counts.",
    "train/updates": "Optimizer updates that were applied since the run began.",
    "train/skipped_updates": "Updates of the step that were skipped for a gradient that is not "
    "finite.",
    "train/skipped_updates_in_all": "The same since the run began.",
    "train/grad_norm": "Norm of the gradient before clipping, mean over the step's updates. Far "
    "above `train.max_grad_norm` every step is cut to that length.",
    "train/learning_rate": "Learning rate of the step's last update.",
    "train/relative_update": "How far the step moved the weights: the norm of an update over the "
    "norm of the trained weights, summed over the step's updates. About 1e-5 to 1e-3 where a "
    "pretrained model learns; below 1e-7 float32 rounds it away. Large tensors are sampled.",
    # the critic
    "critic/updates": "As `train/updates`, of the critic.",
    "critic/skipped_updates": "As `train/skipped_updates`, of the critic.",
    "critic/skipped_updates_in_all": "As `train/skipped_updates_in_all`, of the critic.",
    "critic/grad_norm": "As `train/grad_norm`, of the critic.",
    "critic/learning_rate": "As `train/learning_rate`, of the critic.",
    "critic/relative_update": "As `train/relative_update`, of the critic.",
    "critic/value_mean": "Mean value that the critic gives trained tokens.",
    "critic/return_mean": "Mean return that it is to learn.",
    "critic/squared_error": "Mean squared difference of the two.",
    "critic/clip_fraction": "Trained tokens at which value clipping decides the loss.",
    "critic/explained_variance": "1 - variance of (return - value) / variance of the return, "
    "before the update: 1 is a perfect critic, 0 one that says the mean, below 0 worse than that.",
    # evaluation
    "eval/avg@<k>": "Mean reward over tasks, of k samples each.",
    "eval/pass@<k>": "Unbiased estimate of the probability that one of k samples succeeds (reward "
    "of at least `eval.success_threshold`).",
    "eval/error_fraction": "Samples of the evaluation that failed and count for nothing.",
    "eval/<set>/<metric>": "The same of each of several `[[env]]` or `eval.sets`.",
    "red_team/paid": "Cheaters that the environment paid in full on half of the tasks or more "
    "(`eval.red_team`).",
    "red_team/<cheater>": "Mean reward of a cheater.",
    "red_team/<set>/<cheater>": "The same of each of several evaluations.",
    # weights to servers
    "sync/seconds": "From the end of the update until all servers have the new weights.",
    "sync/write_s": "Of that, putting the weights where servers read them.",
    "sync/paused_s": "Of that, the longest time for which a server generated nothing.",
    "sync/probe_logprob_diff_max": "After the update: largest difference between a server's "
    "log-probabilities of a fixed text and the trainer's. Above `inference.sync_tolerance` the run "
    "stops.",
    "sync/servers_missed": "Servers that did not get the weights in time. They get them before "
    "they are asked again.",
    "sync/server_restarts": "Restarts of servers that this run started and that died or hung, "
    "since its start.",
    "sync/sleep_s": "Before the update: until all servers had given their GPU's memory back "
    "(`inference.share`).",
    "sync/not_asleep": "Servers that could not, and were ended; they start again after the update.",
    # time
    "time/step_s": "The whole step.",
    "time/rollout_s": "Of that, waiting for rollouts. With `rollout.max_staleness` above 0 they "
    "are played while the trainer works, so this is what it waits for beyond that.",
    "time/train_s": "Of that, the update.",
    # the log itself
    "log/num_non_finite": "Values of the line that were NaN or infinite, and are therefore null.",
}


def meaning(metric: str) -> str | None:
    """Returns the meaning of a metric; None if it is not documented."""
    if metric in METRICS:
        return METRICS[metric]
    for name, text in METRICS.items():
        if "<" in name and _pattern(name).fullmatch(metric):
            return text
    return None


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        re.sub(r"<\w+>", ".+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))
    )
