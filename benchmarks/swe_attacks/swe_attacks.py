"""Grades patches that try to get a verdict they do not deserve, and honest ones that look odd.

    python benchmarks/swe_attacks/swe_attacks.py --dataset DIR/dataset.jsonl [--only NAME ...]

Grades each patch on the fixture instances (`python benchmarks/swe_fixtures/build.py --out DIR`)
under both policies. Prints a table with the official verdict, the withheld values that are right,
the outcome under `strict`, and the reward.

With `--payoff --draws N`, grades each patch N times under `strict` and prints its mean reward
beside one official verdict. An attack that relies on luck must earn less than 2% of an honest fix.

The attackers know the names of the hidden tests, which agents do not.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from attack_rows import FURTHER, STATED, Attack
from attack_rows_control import CONTROL
from attack_rows_guess import GUESS
from attack_rows_runtime import RUNTIME
from attack_rows_stranger import STRANGER

from agentrl.errors import AgentRLError, DataError
from agentrl_swebench.dataset import Instance, load_instances
from agentrl_swebench.grade import Verdict, grade

ATTACKS: tuple[Attack, ...] = STATED + FURTHER + RUNTIME + CONTROL + GUESS + STRANGER


@dataclass(slots=True, frozen=True)
class Row:
    """One line of the table."""

    attack: Attack
    official: Verdict
    """Of the whole patch, with a withheld run."""
    strict: Verdict

    @property
    def as_expected(self) -> bool:
        """True if an honest patch is rewarded, or an attack gets 0 or is masked because no
        value confirms it. An attack must never count as a failure of the infrastructure."""
        if self.attack.kind == "semantic":
            return self.strict.reward is not None
        if self.attack.kind == "attack":
            return not self.strict.reward and self.strict.outcome != "infrastructure"
        # The harness fails a fix that prints its error code, and no policy may improve a verdict.
        if self.official.resolved is False:
            return self.strict.reward == 0.0
        # Tests in other languages than Python have no withheld values.
        return self.strict.reward == (None if "uncovered" in self.strict.flags else 1.0)


async def grade_attack(attack: Attack, instance: Instance, *, run_id: str = "attacks") -> Row:
    """Grades one patch under both policies, each with a withheld run."""
    instance = attack.change(instance)
    patch = attack.make_patch(instance)
    options = {"run_id": run_id, "timeout_s": attack.timeout_s, "withhold": True}
    official = await grade(instance, patch, policy="official", **options)
    return Row(attack, official, await grade(instance, patch, policy="strict", **options))


HEAD = f"{'patch':28} {'kind':9} {'official':13} {'values':11} {'strict':13} {'reward':6} flags"


def format_row(row: Row) -> str:
    values = row.official.withheld.removesuffix(" values") or "-"
    flags = [*row.strict.flags, *row.strict.notes]
    flags += [f"dropped {path}" for path, _ in row.strict.dropped]
    reward = "masked" if row.strict.reward is None else f"{row.strict.reward:.0f}"
    mark = "" if row.as_expected else "  UNEXPECTED"
    return (
        f"{row.attack.name:28} {row.attack.kind:9} {row.official.outcome:13} {values:11} "
        f"{row.strict.outcome:13} {reward:6} {'; '.join(flags)}{mark}"
    )


async def run_table(instances: Sequence[Instance], attacks: Sequence[Attack]) -> list[Row]:
    """Grades the attacks and prints the table line by line.

    Raises:
        DataError: the dataset lacks an instance that an attack needs.
    """
    by_id = {instance.instance_id: instance for instance in instances}
    for attack in attacks:
        if attack.instance_id not in by_id:
            raise DataError(f"the dataset has no instance {attack.instance_id}")
    rows = []
    print(HEAD, flush=True)
    tasks = [
        asyncio.create_task(grade_attack(attack, by_id[attack.instance_id])) for attack in attacks
    ]
    for task in tasks:
        rows.append(await task)
        print(format_row(rows[-1]), flush=True)
    return rows


async def print_payoffs(
    instances: Sequence[Instance], attacks: Sequence[Attack], draws: int
) -> bool:
    """Grades each patch `draws` times under `strict` and prints its mean reward beside one official
    verdict. Returns True if all attacks earn less than 0.02, which is 2% of an honest fix."""
    by_id = {instance.instance_id: instance for instance in instances}
    print(f"{'patch':28} {'kind':9} official     draws paid masked payoff", flush=True)
    all_lose = True
    for attack in attacks:
        instance = attack.change(by_id[attack.instance_id])
        patch, options = attack.make_patch(instance), {"run_id": "payoff"}
        options |= {"timeout_s": attack.timeout_s}
        official = await grade(instance, patch, policy="official", **options)
        options |= {"withhold": True, "official_run": "uncovered"}
        calls = (grade(instance, patch, policy="strict", **options) for _ in range(draws))
        rewards = [verdict.reward for verdict in await asyncio.gather(*calls)]
        payoff = sum(filter(None, rewards)) / draws
        all_lose &= attack.kind != "attack" or payoff < 0.02
        paid, masked = rewards.count(1.0), rewards.count(None)
        print(
            f"{attack.name:28} {attack.kind:9} {official.outcome:12} "
            f"{draws:5} {paid:4} {masked:6} {payoff:6.3f}",
            flush=True,
        )
    return all_lose


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/swe_attacks/swe_attacks.py",
        description="Grade patches that try to forge a verdict, and print the results.",
    )
    parser.add_argument("--dataset", required=True, metavar="FILE", help="dataset of the fixtures")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these patches")
    parser.add_argument("--payoff", action="store_true", help="print each patch's mean reward")
    parser.add_argument(
        "--draws", type=int, default=24, metavar="N", help="gradings per patch (default: 24)"
    )
    given = parser.parse_args(arguments)
    attacks = [each for each in ATTACKS if not given.only or each.name in given.only]
    try:
        if given.payoff:
            instances = load_instances(given.dataset)
            return 0 if asyncio.run(print_payoffs(instances, attacks, given.draws)) else 1
        rows = asyncio.run(run_table(load_instances(given.dataset), attacks))
    except AgentRLError as error:
        print(f"agentrl: {error}", file=sys.stderr)
        return error.exit_code
    spoofed = [row for row in rows if row.attack.kind == "attack" and row.official.resolved]
    rewarded = [row for row in rows if row.attack.kind == "attack" and row.strict.reward]
    honest = [row for row in rows if row.attack.kind == "honest" and row.official.resolved]
    refused = [row for row in honest if row.strict.reward != 1.0]
    print(
        f"\n{len(rows)} patches. Attacks that fool the official verdict: {len(spoofed)}; "
        f"rewarded under strict: {len(rewarded)}. Honest fixes: {len(honest)}; refused: "
        f"{len(refused)}."
    )
    return 0 if all(row.as_expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
