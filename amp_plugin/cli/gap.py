"""Define `amp-plugin gap`, which finds out why the log-probabilities of trainer and generator differ."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import typer

from amp_plugin.cli.arguments import Arguments, AsJson, AsModule, Script, fail, program_of
from amp_plugin.cli.rules import require_target


def gap(
    script: Script,
    arguments: Arguments = None,
    as_module: AsModule = False,
    rollout: Annotated[
        Path | None,
        typer.Option(help="The generator's rollout file, with one JSON object per line. Required."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the op rules to this file.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="The temperature by which the trainer divides its logits.")
    ] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="The top-p with which the trainer computes log-probabilities.")
    ] = 1.0,
    dtype: Annotated[
        Literal["bf16", "fp16"], typer.Option(help="The 16-bit dtype that the generator computes in.")
    ] = "bf16",
    batch_size: Annotated[int, typer.Option(min=1, help="The number of sequences per batch.")] = 8,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find out why the log-probabilities of a trainer and a generator differ, and what closes the gap.

    The script runs in a copy of the current folder. It stops at the first call in which the script's model
    computes logits with gradients enabled. The model then computes the log-probabilities of the tokens
    in the rollout file, inside the script's autocast block.

    The exit code is 0 if rounding alone explains the gap, 1 if the gap has another cause or is not explained,
    and 2 if the file or an option is wrong.
    """
    if rollout is None:
        fail("--rollout FILE is missing; give the file in which the generator recorded its tokens", code=2)
    if output is not None:
        require_target(output, force=force)
    from amp_plugin.precision import DTYPES  # noqa: PLC0415 - loads torch
    from amp_plugin.tuning.gap import Gap, close_gap  # noqa: PLC0415 - loads torch
    from amp_plugin.tuning.workload import Script as Trainer  # noqa: PLC0415 - loads torch

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # keeps torch's profiler quiet
    program = program_of(script, as_module=as_module, core_for="gap")
    try:
        goal = Gap(rollout, temperature=temperature, top_p=top_p, dtype=DTYPES[dtype], batch_size=batch_size)
    except (OSError, ValueError) as error:
        fail(str(error), code=2)
    try:
        with closing(Trainer(program, arguments or [], batches=1)) as trainer:
            model, step = trainer.first_call()
        device = next((param.device.type for param in model.parameters()), "cpu")
        found = close_gap(step, goal, model=model, device_type=device, progress=not as_json)
        if output is not None:
            found.save(output)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        fail(str(error), code=2)
    print(json.dumps({"script": program.name, **found.to_dict()}) if as_json else found.report())
    raise typer.Exit(0 if found.is_rounding else 1)
