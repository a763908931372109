"""Train under DeepSpeed and AmpAccelerator in each config, on the CPU, and write the results as JSON.

The second of four batches overflows.
"""

import json
import os
import warnings
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin

from amp_plugin import OpRules
from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs
from amp_plugin.adapters.session import Session

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
AUTOCAST_BF16 = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
LINEAR_IN_FP32 = OpRules.default("cpu").with_rule("aten::linear", "fp32")
# Name -> mixed_precision, the ZeRO stage, sections of the config, our options.
# Runs with torch_autocast come last, because DeepSpeed remembers for the whole process that it was on.
RUNS = {
    "fp32": ("no", 0, {}, {}),
    "fp32, ignored": ("no", 0, {}, {"on_nonfinite": "ignore"}),
    "fp16": ("fp16", 0, {}, {"init_scale": 256.0, "hysteresis": 1}),
    "fp16 in ZeRO": ("fp16", 2, {}, {"init_scale": 256.0, "hysteresis": 1, "growth_interval": 1}),
    "bf16 in ZeRO": ("bf16", 1, {}, {}),
    "bf16, raised": ("bf16", 1, {}, {"on_nonfinite": "raise"}),
    "bf16, ignored": ("bf16", 1, {}, {"on_nonfinite": "ignore"}),
    "fp16, endless": ("fp16", 1, {}, {"max_skips_in_a_row": 2}),
    "autocast fp16": ("no", 0, AUTOCAST, {"init_scale": 1024.0, "growth_interval": 2}),
    "autocast bf16": ("no", 0, AUTOCAST_BF16, {}),
    "autocast fp16, endless": ("no", 0, AUTOCAST, {"max_skips_in_a_row": 2}),
    "autocast fp16, rules": ("no", 0, AUTOCAST, {"rules": LINEAR_IN_FP32}),
    "autocast fp16, fp32 modules": ("no", 0, AUTOCAST, {"fp32_modules": ["Linear"]}),
    "autocast fp16 in ZeRO": ("no", 1, AUTOCAST, {}),
}


def train(precision, stage, sections, options, overflows):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    Session.forget_rules()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        **sections,
    }
    accelerator = AmpAccelerator(
        mixed_precision=precision,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        kwargs_handlers=[AmpKwargs(**options)] if options else [],
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    steps = []
    weight = next(model.parameters())
    for i in range(4):
        before = weight.detach().float().clone()
        output = model(torch.ones(2, 8, dtype=dtype))
        accelerator.backward(output.float().pow(2).mean() * (torch.inf if i in overflows else 1.0))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        result, (rate,) = accelerator.last_step(optimizer), schedule.get_last_lr()
        step = {"output": str(output.dtype), "norm": result.norm.item(), "metrics": accelerator.amp_metrics()}
        step["skipped"] = [result.skipped, accelerator.optimizer_step_was_skipped]
        step["scales"] = [result.scale_before, result.scale_after]
        step |= {"moved": (weight.detach().float() - before).norm().item() / rate, "rate": rate}
        steps.append(step)
    accelerator.end_training()
    return steps


def main(file):
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed keeps using the process group, so end_training() must not destroy it. DeepSpeed reports that
    # most CPUs do not support fp16, although it runs there.
    PartialState.destroy_process_group = lambda *_: None
    type(get_accelerator()).is_fp16_supported = lambda _: True
    seen = {}
    for name, (precision, stage, sections, options) in RUNS.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                overflows = {1, 2, 3} if "endless" in name else {1}
                steps, error = train(precision, stage, sections, options, overflows), ""
            except (FloatingPointError, RuntimeError) as raised:
                steps, error = [], f"{type(raised).__name__}: {raised}"
        seen[name] = {"steps": steps, "error": error, "told": [str(warning.message) for warning in told]}
    Path(file).write_text(json.dumps(seen))
    os._exit(0)
