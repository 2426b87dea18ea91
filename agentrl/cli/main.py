"""The `agentrl` command. Handlers import what they need, so that `--help` stays quick."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl import __version__
from agentrl.errors import AgentRLError

if TYPE_CHECKING:
    from agentrl.config import RunConfig

_OVERRIDES = (
    "Any key of the run file can be set on the command line as --section.key value, for example "
    "--run.seed 2 --rollout.group_size 16 --objective.preset dapo."
)
_WHOSE_EPISODES = (
    "The policy is model.path, a checkpoint, or a server (--inference.backend vllm|sglang|openai "
    "--inference.urls URL)."
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit status (2 for wrong input, 130 when interrupted)."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not getattr(arguments, "takes_overrides", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.overrides = rest
    try:
        return arguments.handler(arguments)
    except AgentRLError as error:
        for line in str(error).splitlines() or [repr(error)]:
            print(f"agentrl: error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("agentrl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except OSError as error:
        # A file that cannot be read or written is the caller's to mend; a socket would be a bug.
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"agentrl: error: {where}{error.strerror}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentrl",
        description="A Gym for language-model agents and the trainer that learns from it.",
        epilog="Start with: agentrl examples, then agentrl train examples/quickstart/run.toml",
    )
    parser.add_argument("--version", action="version", version=f"agentrl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(handler=lambda _: _print_help(parser))
    _add_train(commands)
    _add_eval(commands)
    _add_rollout(commands)
    _add_suite(commands)
    _add_regrade(commands)
    _add_compare(commands)
    _add_convert(commands)
    _add_tasks(commands)
    _add_proxy(commands)
    _add_sft(commands)
    _add_merge(commands)
    _add_export(commands)
    _add_view(commands)
    _add_report(commands)
    _add_doctor(commands)
    _add_drill(commands)
    _add_examples(commands)
    _add_agent(commands)
    from agentrl.algo.cli import add_algo_commands
    from agentrl.cli.data import add_data_commands
    from agentrl.cli.env import add_env_commands
    from agentrl.cli.inference import add_inference_commands
    from agentrl.cli.launch import add_launch_command

    add_env_commands(commands)
    add_data_commands(commands)
    add_algo_commands(commands)
    add_inference_commands(commands)
    add_launch_command(commands)
    # Environments bring commands of their own; agentrl names none of them.
    # By name: an older installation beside this one lists them as well.
    added = {
        entry_point.name: entry_point for entry_point in entry_points(group="agentrl.commands")
    }
    for _, entry_point in sorted(added.items()):
        entry_point.load()(commands)
    return parser


def _print_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


class _HelpWithKeys(argparse.Action):
    """Prints --help with the keys of the configuration. Reading these needs pydantic, so they are
    read only on demand."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option: str | None = None,
    ) -> None:
        parser.print_help()
        from rich.console import Console
        from rich.padding import Padding
        from rich.text import Text

        from agentrl.config.load import FIRST_KEYS, valid_keys

        keys = valid_keys()
        console = Console(highlight=False)
        if option == "--help-all":
            console.print("\nkeys of a run file, with their defaults:")
        else:
            console.print(
                f"\nkeys of a run file that people set first, with their defaults (--help-all "
                f"shows all {len(keys)}):"
            )
            keys = {key: keys[key] for key in FIRST_KEYS}
        section = ""
        for key, (default, meaning) in keys.items():
            if key.split(".")[0] != section:
                section = key.split(".")[0]
                console.print(f"\n[bold]\\[{section}][/]")
            console.print(Text.assemble(("  --" + key, "cyan"), f"  {default}"), soft_wrap=True)
            if meaning:
                console.print(Padding(Text(meaning), (0, 0, 0, 6)))
        parser.exit()


def _add_run_command(
    commands: argparse._SubParsersAction,
    name: str,
    run: Callable[[RunConfig, argparse.Namespace], int],
    *,
    help: str,
    description: str,
    plays_one_environment: bool = True,
) -> argparse.ArgumentParser:
    """Adds a command that takes a run file, whose keys are options; `run` gets the configuration.

    Args:
        plays_one_environment: `--environment` has to name one of the file's `[[env]]`.
    """
    command = commands.add_parser(
        name,
        help=help,
        description=f"{description} {_OVERRIDES}",
        allow_abbrev=False,
        add_help=False,
    )
    command.add_argument("run_file", type=Path, metavar="RUN.toml", help="configuration of the run")
    command.add_argument("-h", "--help", action=_HelpWithKeys, nargs=0, help="show this help")
    command.add_argument(
        "--help-all", action=_HelpWithKeys, nargs=0, help="show this help with every key"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and stop"
    )

    if plays_one_environment:
        command.add_argument(
            "--environment", metavar="NAME", help="which one, of a run file with several [[env]]"
        )

    def handler(arguments: argparse.Namespace) -> int:
        from agentrl.config import load_config

        resume = ["--run.resume=true"] if getattr(arguments, "resume", False) else []
        if replay := getattr(arguments, "replay", None):
            resume.append(f"--run.replay={replay}")
        if steps := getattr(arguments, "profile", None):
            resume.append(f"--run.profile={steps}")
        config = load_config(arguments.run_file, arguments.overrides + resume)
        if plays_one_environment:
            config = _one_environment(config, arguments.environment)
        if "id" not in config.env.model_fields_set:
            print(
                f"agentrl: the run file names no environment, so it is env.id = {config.env.id!r} "
                "(agentrl env list)",
                file=sys.stderr,
            )
        if arguments.dry_run:
            envs = [_env_of(alone) for alone in config.environments.values()]
            print(config.to_toml(), *envs, _dialect_of(config), sep="\n")
            return 0
        return run(config, arguments)

    command.set_defaults(handler=handler, takes_overrides=True)
    return command


def _one_environment(config: RunConfig, name: str | None) -> RunConfig:
    """Returns the configuration for one environment of the run.

    Raises:
        ConfigError: no environment has this name, or there are several and no name is given.
    """
    from agentrl.errors import ConfigError

    names = ", ".join(env.name for env in config.envs)
    if not config.envs:
        if name is not None:
            raise ConfigError("--environment: the run file has one environment only; leave it out")
        return config
    if name not in config.environments:
        raise ConfigError(f"the run file has several environments; give --environment, of {names}")
    return config.environments[name]


def _env_of(config: RunConfig) -> str:
    """Returns, as a comment, whether the environment takes its configuration.

    Raises:
        ConfigError: the environment does not exist, or rejects a key or value.
    """
    if config.env.url:
        return f"# env: asked of {', '.join(config.env.url)} when the run starts"
    from agentrl.env.base import load_config
    from agentrl.env.registry import resolve

    load_config(resolve(config.env.id), config.env.config)
    return f"# env: {config.env.id} takes this configuration"


def _dialect_of(config: RunConfig) -> str:
    """Returns, as a comment, the dialect that calls are read in.

    Raises:
        ConfigError: the dialect does not fit the chat template.
    """
    from agentrl.model.text.template import named_dialect, read_template

    path, wanted = config.model.path, config.rollout.dialect
    if config.inference.backend == "openai":
        said = f"{named_dialect(wanted).name}, where the server leaves calls in the text"
    elif template := read_template(
        path, config.rollout.template, wanted, config.rollout.tools, config.model.chat_template
    ):
        said = f"{template.dialect.name}, {template.note}"
    else:
        said = f"{wanted}; {path} has no chat template on this disk to ask"
    return f"# rollout.dialect: {said}"


def _add_checkpoint(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--checkpoint",
        metavar="DIR|latest",
        help="a checkpoint directory, or `latest` of the run directory, instead of model.path",
    )


def _add_train(commands: argparse._SubParsersAction) -> None:
    command = _add_run_command(
        commands,
        "train",
        _train,
        help="train a policy in an environment",
        description="Train a policy with reinforcement learning.",
        plays_one_environment=False,
    )
    command.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint of the run directory; an error if there is none",
    )
    command.add_argument(
        "--replay",
        metavar="RUN",
        help="train on the trajectories that this run recorded, in place of new ones",
    )
    command.add_argument(
        "--profile",
        metavar="STEPS",
        help="write traces of these steps for Perfetto, such as 3 or 3,20, to the run's traces/",
    )
    command.add_argument("--quiet", action="store_true", help="no display and no lines per step")


def _train(config: RunConfig, arguments: argparse.Namespace) -> int:
    from agentrl.view.display import loading

    with loading("loading PyTorch", quiet=arguments.quiet):
        import agentrl.train.loop  # noqa: F401
    from agentrl.api import train
    from agentrl.model import ranks

    train(config, quiet=arguments.quiet)
    ranks.end_process(0)
    return 0


def _add_eval(commands: argparse._SubParsersAction) -> None:
    command = _add_run_command(
        commands,
        "eval",
        _eval,
        help="measure a policy: avg@k and pass@k with confidence intervals",
        description="Play the first tasks of eval.split and report avg@k and unbiased pass@k with "
        f"confidence intervals. {_WHOSE_EPISODES}",
    )
    _add_checkpoint(command)
    command.add_argument(
        "--out", type=Path, help="keep every episode in this directory as it ends, and the result"
    )
    command.add_argument(
        "--resume",
        dest="go_on",
        action="store_true",
        help="go on with the evaluation in --out: play what is missing there, or failed for a "
        "reason that may have passed; shards are taken over",
    )
    command.add_argument(
        "--shard",
        metavar="I/N",
        help="play every N-th task from the I-th on, into a folder of its own below --out; several "
        "processes do one evaluation, which --resume without --shard concludes",
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _eval(config: RunConfig, arguments: argparse.Namespace) -> int:
    from agentrl.cli.results import evaluate_command

    return evaluate_command(
        config,
        checkpoint=arguments.checkpoint,
        out=arguments.out,
        resume=arguments.go_on,
        shard=arguments.shard,
        as_json=arguments.json,
    )


def _add_suite(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "suite",
        help="measure several models on several benchmarks: one table",
        description="Play every benchmark of a suite file with every model, and write the table as "
        "Markdown, HTML, LaTeX and JSON. Called again it plays what is missing "
        "(docs/evaluation.md).",
    )
    command.add_argument("suite", type=Path, metavar="SUITE.toml", help="models and benchmarks")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="keeps every cell")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(handler=_suite)


def _suite(arguments: argparse.Namespace) -> int:
    from agentrl.cli.suite import suite_command

    return suite_command(arguments.suite, arguments.out, as_json=arguments.json)


def _add_regrade(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "regrade",
        help="grade an evaluation's episodes again with other reward functions",
        description="Run reward functions over the episodes that `agentrl eval --out DIR` kept, "
        "without playing them again, and show which verdicts changed. Keys of the evaluation's "
        "configuration are options, such as --reward.functions math. Writes DIR/regrade.json and "
        "leaves the old verdicts as they are.",
        allow_abbrev=False,
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="of agentrl eval --out")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(handler=_regrade, takes_overrides=True)


def _regrade(arguments: argparse.Namespace) -> int:
    from agentrl.evaluate.regrade import regrade_command

    return regrade_command(arguments.folder, arguments.overrides, as_json=arguments.json)


def _add_compare(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "compare",
        help="compare two evaluations of the same tasks",
        description="The difference between two evaluations that `agentrl eval --out` kept, task "
        "by task: its interval, a permutation test, the smallest difference that so many tasks "
        "would show, and the tasks that changed most.",
    )
    command.add_argument("first", type=Path, metavar="A", help="a folder of agentrl eval --out")
    command.add_argument("second", type=Path, metavar="B", help="another one")
    command.add_argument(
        "--difference",
        type=float,
        metavar="D",
        help="say how many tasks find a difference of D, such as 0.02, in four of five evaluations",
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(handler=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    from agentrl.evaluate.compare import compare_command

    return compare_command(
        arguments.first, arguments.second, as_json=arguments.json, wanted=arguments.difference
    )


def _add_convert(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "convert",
        help="evaluations of inspect_ai and lm-eval, read and written; trajectories as ATIF",
        description="Turn an evaluation that `agentrl eval --out` kept into a log of inspect_ai "
        "(OUT.eval) or samples of lm-evaluation-harness (OUT.jsonl); or either of them into a "
        "folder, which regrade, compare and view read. OUT.atif becomes a folder with a file in "
        "Harbor's trajectory format for each episode of any of these, or of a training run.",
    )
    command.add_argument("source", type=Path, metavar="SOURCE", help="a folder, .eval or .jsonl")
    command.add_argument("out", type=Path, metavar="OUT", help="a folder, .eval, .jsonl or .atif")
    command.add_argument(
        "--score",
        metavar="NAME",
        help="which scorer or metric becomes the reward; the first one when not given",
    )
    command.set_defaults(handler=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    from agentrl.exchange import convert_command

    return convert_command(arguments.source, arguments.out, arguments.score)


def _add_tasks(commands: argparse._SubParsersAction) -> None:
    command = _add_run_command(
        commands,
        "tasks",
        _tasks,
        help="find tasks of the evaluation that are trained on, or that say nothing",
        description="Compare the prompts of eval.split with those of env.split, exactly and "
        "nearly; and list the tasks that every sample of some evaluations solves, or none.",
    )
    command.add_argument(
        "--played",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="folders of agentrl eval --out, of any models, for the tasks that all or none solve",
    )
    command.add_argument(
        "--threshold",
        type=float,
        default=0.8,
        help="share of what is special in a prompt that makes it near another; %(default)s",
    )
    command.add_argument(
        "--most", type=int, default=100_000, help="tasks that are read of a split; %(default)s"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def _tasks(config: RunConfig, arguments: argparse.Namespace) -> int:
    from agentrl.overlap import tasks_command

    return tasks_command(
        config,
        arguments.played,
        threshold=arguments.threshold,
        most=arguments.most,
        as_json=arguments.json,
    )


def _add_rollout(commands: argparse._SubParsersAction) -> None:
    command = _add_run_command(
        commands,
        "rollout",
        _rollout,
        help="play episodes and keep them, without training",
        description="Play eval.num_tasks tasks of eval.split, eval.samples_per_task times each, "
        f"and write trajectories, metrics and a report to a directory. {_WHOSE_EPISODES}",
    )
    _add_checkpoint(command)
    command.add_argument("--out", type=Path, required=True, help="directory of the result")
    command.add_argument(
        "--resume",
        dest="go_on",
        action="store_true",
        help="go on with the rollouts in --out: play what is missing there, or failed for a reason "
        "that may have passed",
    )


def _rollout(config: RunConfig, arguments: argparse.Namespace) -> int:
    from agentrl.cli.results import rollout_command

    return rollout_command(
        config, checkpoint=arguments.checkpoint, out=arguments.out, resume=arguments.go_on
    )


def _add_proxy(commands: argparse._SubParsersAction) -> None:
    command = _add_run_command(
        commands,
        "proxy",
        _proxy,
        help="record agents that are started elsewhere",
        description="Serve the endpoint that agents call, and open an episode for each of the "
        "first eval.num_tasks tasks of eval.split, eval.samples_per_task times each. Each is a "
        "line of JSON on the standard output, with its task, the base URL and API key for its "
        "agent and the URL that ends it; trajectories, metrics and a report are written to a "
        f"directory. {_WHOSE_EPISODES.replace('vllm|sglang|openai', 'vllm|sglang')}",
    )
    _add_checkpoint(command)
    command.add_argument("--out", type=Path, required=True, help="directory of the result")


def _proxy(config: RunConfig, arguments: argparse.Namespace) -> int:
    from agentrl.cli.proxy import proxy_command

    return proxy_command(config, checkpoint=arguments.checkpoint, out=arguments.out)


def _add_agent(commands: argparse._SubParsersAction) -> None:
    agent = commands.add_parser(
        "agent", help="try an agent of your own", description="Try an agent of your own."
    )
    command = agent.add_subparsers(title="commands", metavar="COMMAND", required=True).add_parser(
        "check",
        help="say what becomes of an agent's calls",
        description="Let an agent play scripted episodes, without a model: rows of tokens per "
        "call, the first message that it sends back as another one, refused requests, tools that "
        "the policy does not see, and what to set. Its tools are called, with made-up arguments. "
        "Exit status 1 if anything is to be changed.",
    )
    command.add_argument(
        "agent",
        nargs="+",
        metavar="FUNCTION|CMD",
        help="file.py:function or module:function, or a program and its arguments, behind -- where "
        "they begin with a dash; {prompt} and the like are filled in",
    )
    command.add_argument("--prompt", default="What is 6 times 7?", help="the task; %(default)s")
    command.add_argument("--model", help="whose chat template; a tiny one's when not given")
    command.add_argument("--answer", default="last_line", help="agent.answer; %(default)s")
    command.add_argument("--home", default="private", help="agent.home; %(default)s")
    command.add_argument(
        "--timeout-s", type=float, default=120.0, help="of each episode; %(default)s"
    )
    command.set_defaults(handler=_agent_check)


def _agent_check(arguments: argparse.Namespace) -> int:
    from agentrl.cli.agent_check import check_command

    return check_command(
        arguments.agent,
        model=arguments.model,
        prompt=arguments.prompt,
        timeout_s=arguments.timeout_s,
        keys={"answer": arguments.answer, "home": arguments.home},
    )


def _add_sft(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "sft",
        help="cold start: fine-tune on demonstrations",
        description=(
            "Supervised fine-tuning on JSONL demonstrations, one "
            '{"messages": [...], "tools": [...]} per line. Dialogues are tokenised exactly as '
            "rollouts are; only assistant turns are trained. Or the best trajectories of a run: "
            "agentrl sft --from RUN --best 1 --out MODEL."
        ),
    )
    command.add_argument(
        "demonstrations",
        type=Path,
        nargs="?",
        metavar="DEMOS.jsonl",
        help="dialogues, one JSON per line",
    )
    command.add_argument(
        "--model", help="model to start from (directory or name); with --from the run's own"
    )
    command.add_argument(
        "--from",
        dest="run_dir",
        type=Path,
        metavar="RUN",
        help="learn from the best trajectories that this run recorded (rejection sampling)",
    )
    command.add_argument(
        "--best",
        type=int,
        default=1,
        help="with --from: trajectories of each task (default: %(default)s)",
    )
    command.add_argument(
        "--min-reward",
        type=float,
        default=1.0,
        help="with --from: none of a lower reward (default: %(default)s)",
    )
    command.add_argument("--out", type=Path, required=True, help="directory for the tuned model")
    command.add_argument(
        "--epochs", type=int, default=1, help="passes over the dialogues (default: %(default)s)"
    )
    command.add_argument(
        "--batch-size", type=int, default=32, help="dialogues per update (default: %(default)s)"
    )
    command.add_argument(
        "--learning-rate",
        type=float,
        default=1e-5,
        help="peak, cosine after it; 1e-3 for a model of a million weights (default: %(default)s)",
    )
    command.add_argument(
        "--warmup-steps",
        type=int,
        default=10,
        help="updates of linear warm-up (default: %(default)s)",
    )
    command.add_argument(
        "--token-budget",
        type=int,
        default=8192,
        help="tokens per micro-batch (default: %(default)s)",
    )
    command.add_argument(
        "--max-tokens",
        type=int,
        default=4096,
        help="longer dialogues are dropped (default: %(default)s)",
    )
    command.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto takes a GPU if any"
    )
    command.add_argument(
        "--save-dtype",
        default="float32",
        choices=["float32", "bfloat16"],
        help="of the result (default: %(default)s)",
    )
    command.add_argument(
        "--seed", type=int, default=1, help="order of the dialogues (default: %(default)s)"
    )
    command.add_argument(
        "--dialect", default="auto", help="as rollout.dialect of a run file (default: %(default)s)"
    )
    command.add_argument(
        "--tools",
        default="template",
        choices=["template", "prompt", "hidden"],
        help="as rollout.tools of a run file (default: %(default)s)",
    )
    command.add_argument(
        "--chat-template",
        metavar="FILE",
        help="as model.chat_template of a run file; the tuned model brings it",
    )
    command.add_argument(
        "--lora-rank",
        type=int,
        default=0,
        metavar="N",
        help="train an adapter of this rank and add it into the weights (default: all weights)",
    )
    command.set_defaults(handler=_sft)


def _sft(arguments: argparse.Namespace) -> int:
    from agentrl.train.sft import sft

    result = sft(
        arguments.demonstrations,
        model_path=arguments.model,
        run_dir=arguments.run_dir,
        best=arguments.best,
        min_reward=arguments.min_reward,
        out=arguments.out,
        num_epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        warmup_steps=arguments.warmup_steps,
        token_budget=arguments.token_budget,
        max_tokens=arguments.max_tokens,
        device=arguments.device,
        save_dtype=arguments.save_dtype,
        dialect=arguments.dialect,
        tools=arguments.tools,
        seed=arguments.seed,
        chat_template=arguments.chat_template,
        lora_rank=arguments.lora_rank,
    )
    print(
        f"{result.num_updates} updates, loss {result.first_loss:.3f} at first and "
        f"{result.last_loss:.3f} at last; the model is in {arguments.out}"
    )
    if result.num_dropped:
        print(
            f"{result.num_dropped} dialogues were longer than --max-tokens {arguments.max_tokens} "
            "and left out"
        )
    return 0


def _add_merge(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "merge",
        help="add a trained adapter into its base model",
        description="Write the model that an adapter (`model.lora` of a run file) and its base "
        "model make together, for programs that load whole models.",
    )
    command.add_argument("checkpoint", type=Path, help="directory with adapter_config.json")
    command.add_argument("--out", type=Path, required=True, help="directory for the model")
    command.add_argument(
        "--save-dtype", default="float32", choices=["float32", "bfloat16"], help="of the result"
    )
    command.set_defaults(handler=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    from agentrl.model.load import merge_adapter

    merge_adapter(arguments.checkpoint, arguments.out, dtype=arguments.save_dtype)
    print(arguments.out)
    return 0


def _add_export(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "export",
        help="make one model folder of a checkpoint that several ranks wrote in shards",
        description="Put the shards of a checkpoint together, for transformers, vLLM and whatever "
        "else loads a model's folder. Needs host memory for the whole model.",
    )
    command.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step_N")
    command.add_argument("--out", type=Path, required=True, help="directory for the model")
    command.set_defaults(handler=_export)


def _export(arguments: argparse.Namespace) -> int:
    from agentrl.train.checkpoint import export

    export(arguments.checkpoint, arguments.out)
    print(arguments.out)
    return 0


def _add_view(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "view",
        help="look at runs in a browser, down to the token, while they train and afterwards",
        description="Serve pages over run directories, or over all runs of a directory: curves, "
        "groups, trajectories with every token's advantage, and a diagnosis. It reads files only, "
        "follows them while a run goes on, and needs no network.",
    )
    command.add_argument(
        "runs", type=Path, nargs="*", metavar="RUN", help="a run directory, or one of several; runs"
    )
    command.add_argument("--port", type=int, default=8600, help="8600; 0 takes a free one")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on; 127.0.0.1")
    command.add_argument("--token", help="asked of every browser; required beyond this machine")
    command.set_defaults(handler=_view)


def _view(arguments: argparse.Namespace) -> int:
    from agentrl.view.server import view_command

    paths = arguments.runs or [Path("runs")]
    return view_command(paths, host=arguments.host, port=arguments.port, token=arguments.token)


def _add_report(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "report",
        help="write report.html of a run again",
        description="Write a run's self-contained report.html from its metrics and trajectories.",
    )
    command.add_argument("run_dir", type=Path, help="what `agentrl train` wrote")
    command.add_argument(
        "--text", action="store_true", help="print the diagnosis instead, what matters most first"
    )
    command.set_defaults(handler=_report)


def _report(arguments: argparse.Namespace) -> int:
    from agentrl.view.report import report_run, report_text

    print(report_text(arguments.run_dir) if arguments.text else report_run(arguments.run_dir))
    return 0


def _add_drill(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "drill",
        help="plant silent faults in short runs, and see which guard names each",
        description="Train the quickstart's model for a few steps with a fault planted, one of "
        "twelve after the other, and print what named it (docs/drill.md). Minutes on a CPU. Exit "
        "status 1 if one goes unnoticed.",
    )
    command.add_argument(
        "--only", default="", metavar="WORDS", help="those whose name holds these words"
    )
    command.set_defaults(handler=_drill)


def _drill(arguments: argparse.Namespace) -> int:
    from agentrl.cli.drill import drill_command

    return drill_command(arguments.only)


def _add_examples(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "examples",
        help="copy the run files and tiny models that the documentation uses to this directory",
        description="Copy the examples of this version: run files, environments, agents, and the "
        "tiny models that the quickstart and the search example train.",
    )
    command.add_argument(
        "--out", type=Path, default=Path("examples"), help="directory to make; examples"
    )
    command.set_defaults(handler=_examples)


def _examples(arguments: argparse.Namespace) -> int:
    from agentrl.cli.examples import copy_examples

    out = copy_examples(arguments.out)
    print(f"{out}; next: agentrl train {out / 'quickstart' / 'run.toml'}")
    return 0


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "doctor",
        help="check this machine, and a run file, before a run",
        usage="agentrl doctor [RUN.toml] [--play N] [--section.key value ...]",
        description="Check Python, packages, devices, disk and, with a run file, its model, chat "
        "template, environment and servers, and whether training fits into memory; with "
        "--inference.urls URL[,URL] also whether those vLLM servers can be trained against. Exit "
        "status 1 when something must be fixed.",
        allow_abbrev=False,
    )
    command.add_argument(
        "--play",
        type=int,
        default=0,
        metavar="N",
        help="play N episodes of the run file as training would, two a task, and train on them "
        "once: the prompt, rewards, cut turns, calls, sampler against trainer, speed",
    )
    command.set_defaults(handler=_doctor, takes_overrides=True)


def _doctor(arguments: argparse.Namespace) -> int:
    from agentrl.cli.doctor import doctor
    from agentrl.errors import ConfigError

    # No positional of argparse's: it would take the value of an override for the run file.
    rest = arguments.overrides
    named = rest and not rest[0].startswith("--") and "=" not in rest[0]
    run_file = Path(rest.pop(0)) if named else None
    if arguments.play < 0 or (arguments.play and run_file is None):
        raise ConfigError("--play takes a number of episodes and needs a run file before it")
    return doctor(run_file, rest, arguments.play)
