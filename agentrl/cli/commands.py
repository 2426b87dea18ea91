"""The commands of `agentrl` that are not groups, one function each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from agentrl.cli.app import Checkpoint, DryRun, Environment, Json, Key, RunFile, app, resolved

Out = Annotated[Path, Parameter(help="Folder for the result.")]
Dtype = Literal["float32", "bfloat16"]


@app.command
def train(
    run_file: RunFile,
    /,
    *keys: Key,
    resume: bool = False,
    replay: str | None = None,
    profile: str | None = None,
    quiet: bool = False,
    dry_run: DryRun = False,
) -> int:
    """Train a policy with reinforcement learning.

    Ctrl-C and SIGTERM end the run with a checkpoint and status 130; --resume continues it.

    Args:
        resume: Continue from the newest checkpoint of the run directory; an error if there is none.
        replay: Train on the trajectories that this run recorded, in place of new ones.
        profile: Write traces of these steps for Perfetto, such as 3 or 3,20, to the run's traces/.
        quiet: Show no display and no line per step.
    """
    more = ["--run.resume=true"] if resume else []
    more += [f"--run.replay={replay}"] if replay else []
    more += [f"--run.profile={profile}"] if profile else []
    config = resolved(run_file, (*keys, *more), plays_one_environment=False, dry_run=dry_run)
    if config is None:
        return 0
    from agentrl.view.display import loading

    with loading("loading PyTorch", quiet=quiet):
        import agentrl.train.loop  # noqa: F401
    from agentrl import api
    from agentrl.model import ranks
    from agentrl.view.tracking import read_status

    result = api.train(config, quiet=quiet)
    ranks.end_process(0)
    # A launcher of several ranks would take any other status than 0 for a failure.
    return 130 if read_status(result.run_dir)["state"] == "stopped" else 0


@app.command
def sft(
    demonstrations: Path | None = None,
    /,
    *,
    out: Path,
    model: str | None = None,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    best: int = 1,
    min_reward: float = 1.0,
    epochs: int = 1,
    batch_size: int = 32,
    learning_rate: float = 1e-5,
    warmup_steps: int = 10,
    token_budget: int = 8192,
    max_tokens: int = 4096,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    save_dtype: Dtype = "float32",
    seed: int = 1,
    dialect: str = "auto",
    tools: Literal["template", "prompt", "hidden"] = "template",
    chat_template: str | None = None,
    lora_rank: int = 0,
) -> int:
    """Fine-tune on demonstrations, or on the best trajectories of a run.

    A demonstration is a line of JSON, {"messages": [...], "tools": [...]}. Dialogues become tokens
    exactly as in rollouts, and only the assistant's turns are trained.

    Args:
        demonstrations: Dialogues, one JSON object per line; or give --from.
        out: Folder for the tuned model.
        model: Model to start from, a folder or a name; with --from the run's own.
        from_: Learn from the best trajectories that this run recorded (rejection sampling).
        best: With --from, number of trajectories of each task.
        min_reward: With --from, smallest reward of a trajectory.
        epochs: Passes over the dialogues.
        batch_size: Dialogues per update.
        learning_rate: Peak, with a cosine after it; 1e-3 suits a model of a million weights.
        warmup_steps: Updates of linear warm-up.
        token_budget: Tokens per micro-batch.
        max_tokens: Longer dialogues are left out and counted.
        device: Device to train on; auto takes a GPU if there is one.
        save_dtype: Dtype of the saved weights.
        seed: Seed of the dialogues' order.
        dialect: As rollout.dialect of a run file.
        tools: As rollout.tools of a run file.
        chat_template: As model.chat_template of a run file; the tuned model brings it.
        lora_rank: Train an adapter of this rank and add it to the weights; 0 trains all weights.
    """
    from agentrl.train import sft as tuning

    result = tuning.sft(
        demonstrations,
        model_path=model,
        run_dir=from_,
        best=best,
        min_reward=min_reward,
        out=out,
        num_epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        token_budget=token_budget,
        max_tokens=max_tokens,
        device=device,
        save_dtype=save_dtype,
        dialect=dialect,
        tools=tools,
        seed=seed,
        chat_template=chat_template,
        lora_rank=lora_rank,
    )
    print(
        f"{result.num_updates} updates, loss {result.first_loss:.3f} at first and "
        f"{result.last_loss:.3f} at last; the model is in {out}"
    )
    if result.num_dropped:
        print(
            f"{result.num_dropped} dialogues were longer than --max-tokens {max_tokens} and left "
            "out"
        )
    return 0


@app.command(name="eval")
def evaluate(
    run_file: RunFile,
    /,
    *keys: Key,
    out: Path | None = None,
    resume: bool = False,
    shard: str | None = None,
    checkpoint: Checkpoint = None,
    environment: Environment = None,
    json_: Json = False,
    dry_run: DryRun = False,
) -> int:
    """Measure a policy: avg@k and pass@k with confidence intervals.

    Plays the first tasks of eval.split. The policy is model.path, a checkpoint, or a server
    (--inference.backend vllm|sglang|openai --inference.urls URL).

    Args:
        out: Keep every episode in this folder as it ends, and the result.
        resume: Continue the evaluation in --out: play what is missing, or failed for a reason that
            may have passed. Shards are taken over.
        shard: I/N: play every N-th task from the I-th on, into a folder of its own below --out.
            Several processes share one evaluation, which --resume without --shard concludes.
    """
    config = resolved(run_file, keys, environment, dry_run=dry_run)
    if config is None:
        return 0
    from agentrl.cli.results import evaluate_command

    return evaluate_command(
        config, checkpoint=checkpoint, out=out, resume=resume, shard=shard, as_json=json_
    )


@app.command
def rollout(
    run_file: RunFile,
    /,
    *keys: Key,
    out: Out,
    resume: bool = False,
    checkpoint: Checkpoint = None,
    environment: Environment = None,
    dry_run: DryRun = False,
) -> int:
    """Play episodes and keep them, without training.

    Plays eval.num_tasks tasks of eval.split, eval.samples_per_task times each, and writes
    trajectories, metrics and a report. The policy is model.path, a checkpoint, or a server
    (--inference.backend vllm|sglang|openai --inference.urls URL).

    Args:
        resume: Continue the rollouts in --out: play what is missing, or failed for a reason that
            may have passed.
    """
    config = resolved(run_file, keys, environment, dry_run=dry_run)
    if config is None:
        return 0
    from agentrl.cli.results import rollout_command

    return rollout_command(config, checkpoint=checkpoint, out=out, resume=resume)


@app.command
def proxy(
    run_file: RunFile,
    /,
    *keys: Key,
    out: Out,
    checkpoint: Checkpoint = None,
    environment: Environment = None,
    dry_run: DryRun = False,
) -> int:
    """Record agents that another program starts.

    Serves the endpoint that agents call, and opens an episode for each of the first
    eval.num_tasks tasks of eval.split, eval.samples_per_task times each. Prints a line of JSON for
    each: its task, the base URL and API key for its agent, and the URL that ends it. Trajectories,
    metrics and a report are written to --out. The policy is model.path, a checkpoint, or a server
    (--inference.backend vllm|sglang --inference.urls URL).
    """
    config = resolved(run_file, keys, environment, dry_run=dry_run)
    if config is None:
        return 0
    from agentrl.cli.proxy import proxy_command

    return proxy_command(config, checkpoint=checkpoint, out=out)


@app.command
def suite(suite: Path, /, *, out: Path, json_: Json = False) -> int:
    """Measure several models on several benchmarks, in one table.

    Plays every benchmark of a suite file with every model, and writes the table as Markdown and
    JSON (docs/evaluation.md). Called again, it plays what is missing.

    Args:
        suite: Models and benchmarks, such as suite.toml.
        out: Folder that keeps every evaluation, and the table.
    """
    from agentrl.cli.suite import suite_command

    return suite_command(suite, out, as_json=json_)


@app.command
def regrade(folder: Path, /, *keys: Key, json_: Json = False) -> int:
    """Grade an evaluation's episodes again with other reward functions.

    Runs reward functions over the episodes that `agentrl eval --out` kept, without playing them
    again, and shows which verdicts changed. Writes regrade.json to the folder and leaves the old
    verdicts as they are. Keys are those of the evaluation, such as --reward.functions math.

    Args:
        folder: Folder of `agentrl eval --out`.
    """
    from agentrl.evaluate.regrade import regrade_command

    return regrade_command(folder, [*keys], as_json=json_)


@app.command
def compare(
    first: Path,
    second: Path,
    /,
    *,
    difference: float | None = None,
    replay: bool = False,
    json_: Json = False,
) -> int:
    """Compare two evaluations of the same tasks, or two training runs that should be equal.

    Of evaluations, shows the difference task by task: its interval, a permutation test, the
    smallest difference that so many tasks would show, and the tasks that changed most.

    Of training runs, finds the first step, trajectory, token and quantity in which they differ, and
    the keys, packages and devices that do; the status is 1 if they differ.

    Args:
        first: Folder of `agentrl eval --out`, or a run directory.
        second: Another one.
        difference: Of evaluations: show how many tasks find a difference of this size, such as
            0.02, in four of five evaluations.
        replay: Of training runs: play and train the step that differs again, each from its own
            checkpoint, to see which of the two does not repeat itself here.
    """
    from agentrl.cli.compare_runs import compare_runs, is_training_run
    from agentrl.errors import ConfigError

    trained = [is_training_run(each) for each in (first, second)]
    if any(trained) and not all(trained):
        raise ConfigError(f"{first if trained[0] else second} is a training run, the other is not")
    if all(trained):
        if difference is not None:
            raise ConfigError("--difference is for evaluations, and these are training runs")
        return compare_runs(first, second, replay=replay, as_json=json_)
    if replay:
        raise ConfigError("--replay is for training runs, and these are evaluations")
    from agentrl.evaluate.compare import compare_command

    return compare_command(first, second, as_json=json_, wanted=difference)


@app.command
def export(source: Path, /, *, out: Path, save_dtype: Dtype = "float32") -> int:
    """Write a checkpoint as one model folder, or an evaluation as a log of inspect_ai.

    A checkpoint's shards are put together and an adapter is merged into its base model, for
    transformers, vLLM and other programs that load a model's folder; the optimizer's state stays
    behind. Shards and adapters need host memory for the whole model. A log needs pip install
    'agentrl-gym[inspect]'.

    Args:
        source: A run, whose newest checkpoint is taken, RUN/checkpoints/step_N, or a folder of
            `agentrl eval --out`.
        out: Folder of the model, or FILE.eval for a log.
        save_dtype: Dtype of the weights where an adapter is merged.
    """
    from agentrl.cli.export import export_evaluation, export_model

    if out.suffix == ".eval":
        export_evaluation(source, out)
    else:
        export_model(source, out, dtype=save_dtype)
    print(out)
    return 0


@app.command
def view(
    *runs: Path,
    port: int = 8600,
    host: str = "127.0.0.1",
    token: str | None = None,
    report: bool = False,
    play: bool = False,
    server: tuple[str, ...] = (),
    backend: Literal["vllm", "sglang"] = "vllm",
) -> int:
    """Look at runs in a browser, down to the token, while they train and afterwards.

    Serves pages over run directories, or over all runs below a folder: curves, groups,
    trajectories with every token's advantage, and a diagnosis. It only reads files and needs no
    network.

    Args:
        runs: Run directories, or folders of several; `runs` if none is given.
        port: Port to listen on; 0 takes a free one.
        host: Address to listen on; one that other machines can reach needs --token.
        token: Token that every browser has to send.
        report: Instead of serving, write each run's report.html again and print its path and the
            diagnosis.
        play: Let the pages sample on from any token of a trajectory, edited or not, with a
            checkpoint of the run. It loads the models and runs the environments that the runs name,
            so use it on runs that you trust.
        server: With --play, URL of a server that may sample in place of a checkpoint.
        backend: What the servers run.
    """
    if report:
        from agentrl.errors import ConfigError
        from agentrl.view.report import report_run, report_text

        if not runs:
            raise ConfigError("--report needs the run directories: agentrl view RUN --report")
        for run in runs:
            print(report_run(run), report_text(run), sep="\n")
        return 0
    from agentrl.view.server import view_command

    plays = None
    if server and not play:
        from agentrl.errors import ConfigError

        raise ConfigError("--server names who may sample: give --play too")
    if play:
        from agentrl.train.fork import Forks

        plays = Forks([*server], backend)
    paths = [*runs] or [Path("runs")]
    return view_command(paths, host=host, port=port, token=token, plays=plays)


@app.command
def doctor(
    *keys: Annotated[
        str,
        Parameter(
            name="RUN.toml",
            allow_leading_hyphen=True,
            help="Run file, and any of its keys as options, such as --run.seed 2.",
        ),
    ],
    play: int = 0,
) -> int:
    """Check this machine, and a run file, before a run.

    Checks Python, packages, devices and disk. With a run file also its model, chat template,
    environment and servers, and whether training fits into memory. With --inference.urls URL also
    whether these servers can be trained against. The exit status is 1 if something must be fixed.

    Args:
        play: Play this many episodes as training would, two per task, and train on them once.
            Checks the prompt, the agent, rewards, cut turns, calls, sampler against trainer, and
            speed.
    """
    from agentrl.cli import doctor as checks
    from agentrl.errors import ConfigError

    # Not an argument of its own: it would take the value of a key for the run file.
    named = bool(keys) and not keys[0].startswith("--") and "=" not in keys[0]
    run_file = Path(keys[0]) if named else None
    if play < 0 or (play and run_file is None):
        raise ConfigError("--play takes a number of episodes and needs a run file before it")
    return checks.doctor(run_file, [*keys[named:]], play)


@app.command
def launch(
    run_file: RunFile,
    /,
    *keys: Key,
    on: Literal["local", "slurm", "ray"] = "local",
    nodes: int = 1,
    gpus: int | None = None,
    server_nodes: int = 0,
    print_servers: bool = False,
    host: str = "127.0.0.1",
    port: int = 8000,
    platform: Literal["cuda", "cpu"] = "cuda",
    plugin_dir: Path | None = None,
    dry_run: bool = False,
) -> int:
    """Start a run on several GPUs, in Slurm or on Ray, or print how its servers start.

    Checks the run file and starts its ranks by the files of examples/cluster. Slurm reads
    partition, account and time limit from its own variables (SBATCH_PARTITION, ...), Ray its
    cluster from RAY_ADDRESS. For Kubernetes, examples/cluster/jobset.yaml is a manifest to change.

    Args:
        on: Where to start the run.
        nodes: Machines that train.
        gpus: GPUs of each machine; all of this one, or 8 elsewhere.
        server_nodes: Machines of a Slurm job that serve vLLM beside them.
        print_servers: Print the command that starts a server which this run can train against, and
            stop. Name its address in inference.urls. Its weight routes need no token: listen where
            only the trainer can connect.
        host: With --print-servers, address to listen on.
        port: With --print-servers, port to listen on.
        platform: With --print-servers, device of the server.
        plugin_dir: With --print-servers, folder for the servers' half of a weight update, on a disk
            that they see; `plugin` in the run's directory if not given.
        dry_run: Print what would be started, and stop.
    """
    from agentrl.cli.launch import print_server, start

    if print_servers:
        return print_server(run_file, keys, host, port, platform, plugin_dir)
    return start(
        run_file, keys, on=on, nodes=nodes, gpus=gpus, server_nodes=server_nodes, dry_run=dry_run
    )


@app.command(name="import")
def import_(
    source: Path,
    /,
    *,
    from_: Annotated[
        Literal["trl", "verl", "slime", "areal", "prime-rl"] | None, Parameter(name="--from")
    ] = None,
    out: Path | None = None,
    prove: bool = False,
) -> int:
    """Write a run file from another trainer's script or configuration.

    Every key gets a comment with what it was there; what is not taken, and what a person has to do,
    stands at the end. A script is read, not run.

    Args:
        source: TRL's script with GRPOConfig; a yaml of TRL, verl or AReaL; a shell script that
            starts verl or slime; a toml of prime-rl.
        from_: The trainer, where the settings do not tell.
        out: Write here instead of to the terminal.
        prove: Compute one update by TRL's own trainer and by agentrl with these settings, and
            compare advantages, loss and gradient. Needs TRL beside agentrl; exit status 1 means
            that they differ.
    """
    from agentrl.cli.importing import config_of, import_file, run_file
    from agentrl.errors import ConfigError

    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already; name another file with --out")
    found = import_file(source, from_)
    text, certificate = run_file(found, source), None
    if prove:
        from agentrl.cli.examples import example_file
        from agentrl.train.prove import prove as compared

        shape = example_file("quickstart/model/config.json").parent
        certificate = compared(found.trainer, found.given, config_of(found), shape)
        text += "\n# Certificate:\n" + "".join(
            f"# {line}\n" for line in str(certificate).split("\n")
        )
    differs = certificate is not None and not certificate.holds
    if out is None:
        print(text, end="")
        return int(differs)
    out.write_text(text)
    print(
        f"{out}: {len(found.keys)} keys from {found.peer.name}'s settings, {len(found.differs)} of "
        f"them with a difference; {len(found.nothing)} need nothing here"
    )
    for line in found.left.values():
        print(f"to do: {line}")
    if certificate is not None:
        print(certificate)
    return int(differs)


@app.command
def examples(*, out: Path = Path("examples")) -> int:
    """Copy the run files and tiny models that the documentation uses.

    Args:
        out: Folder to make.
    """
    from agentrl.cli.examples import copy_examples

    copied = copy_examples(out)
    print(f"{copied}; next: agentrl train {copied / 'quickstart' / 'run.toml'}")
    return 0
