"""Each rule finds its mistake in a changed recipe, and finds nothing in the correct recipe."""

import ast
import re
from pathlib import Path

import pytest
import torch

import amp_plugin
from amp_plugin.check.checker import check, check_source
from amp_plugin.check.settings import Settings
from amp_plugin.check.sources import Source
from amp_plugin.mistakes import MISTAKES

ROOT = Path(__file__).parents[2]
TORCH = ("from amp_plugin import GradScaler, autocast", "from torch.amp import GradScaler, autocast")
BACKWARD = "        scaler.scale(loss).backward()\n"
STEP = "        scaler.step(optimizer)\n"
UPDATE = "        scaler.update()\n"
CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
UNSCALE = "        scaler.unscale_(optimizer)\n"
REGION = "region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)"
SCALER = "scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)"
FP16 = (REGION, 'region = autocast("cuda", torch.float16)')
BF16 = (REGION, 'region = autocast("cuda", torch.bfloat16)')
LOSS = "        with region:\n            loss = cross_entropy(model(images), labels)\n"
NO_SCALER = ((f"    {SCALER}\n", ""), (BACKWARD + STEP + UPDATE, "        loss.backward()\n        optimizer.step()\n"), (", GradScaler", ""), ("GradScaler, ", ""), ("record.add_scaled_step(loss, scaler, optimizer)", "record.add_to_curve('loss', loss)"))  # fmt: skip
NO_RECORD = ("        record.add_scaled_step(loss, scaler, optimizer)\n", "")
WINDOW = ("    for images, labels in track(", "    for number, (images, labels) in track(")
AT_END = "        if (number + 1) % 4 == 0:\n    "
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)\n"


def read(recipe: str, *changes: tuple[str, str]) -> str:
    """Return a recipe's source with some texts replaced. Each text must occur in it."""
    text = (ROOT / f"recipes/{recipe}.py").read_text()
    for old, new in changes:
        if (old, new) not in NO_SCALER:
            assert old in text, old
        text = text.replace(old, new)
    ast.parse(text)
    return text


def codes(text: str) -> list[str]:
    """Return the codes of the findings in a source."""
    return [
        found.code
        for found in check_source(Source(Path("program.py"), text, tuple(text.split("\n"))), Settings())
    ]


# code: (recipe, changes that make the mistake, changes that do the same thing correctly)
TWINS = {
    "AMP001": [
        ("typical_training", [(BACKWARD, BACKWARD + CLIP)], [(BACKWARD, BACKWARD + UNSCALE + CLIP)]),
        ("typical_training", [TORCH, (STEP, CLIP + UNSCALE + STEP)], [TORCH, (STEP, UNSCALE + CLIP + STEP)]),
        (
            "clipping",
            [("scaler.clip_grad_norm_(optimizer,", "torch.nn.utils.clip_grad_norm_(model.parameters(),"), ("            scaler.clip_grad_value_(optimizer, config.max_value)", "            pass")],
            [("scaler.clip_grad_norm_(optimizer,", "scaler.clip_grad_norm_(model.parameters(),")],
        ),
    ],
    "AMP002": [
        ("typical_training", [(STEP, "        optimizer.step()\n")], [(STEP, "        value = scaler.step(optimizer)\n")]),
        ("accumulation", [(STEP + UPDATE, "        optimizer.step()\n" + UPDATE)], [(STEP, UNSCALE + STEP)]),
        (
            "typical_training",
            [(STEP, STEP + "        optimizer.step()\n")],
            [(BACKWARD + STEP + UPDATE, "        if config.precision.scaled:\n" + "".join(f"    {line}" for line in (BACKWARD, STEP, UPDATE)) + "        else:\n            loss.backward()\n            optimizer.step()\n")],
        ),
    ],
    "AMP003": [
        (
            "train_digits_accelerate",
            [("accelerator.clip_grad_norm_", "torch.nn.utils.clip_grad_norm_")],
            [("accelerator.backward(loss)", "accelerator.backward(loss.mean())")],
        ),
        (
            "train_digits_accelerate",
            [("accelerator.backward(loss)", "loss.backward()")],
            [("accelerator.backward(loss)", "accelerator.backward(2 * loss)")],
        ),
    ],
    "AMP004": [
        ("typical_training", [(UPDATE, ""), NO_RECORD], [NO_RECORD, (STEP + UPDATE, STEP + UPDATE + "        optimizer.zero_grad()\n")]),
        ("typical_training", [(UPDATE, ""), NO_RECORD, ("    record.seconds", "    scaler.update()\n    record.seconds")], [NO_RECORD, ("    record.seconds", "    torch.save(scaler.state_dict(), 'scale.pt')\n    record.seconds")]),
    ],
    "AMP005": [
        (
            "typical_training",
            [TORCH, (STEP, STEP + UPDATE + "        scaler.step(other)\n")],
            [TORCH, (STEP, STEP + "        scaler.step(other)\n")],
        ),
        (
            "typical_training",
            [TORCH, (STEP, UNSCALE + STEP + UPDATE + "        scaler.unscale_(other)\n        scaler.step(other)\n")],
            [TORCH, (UPDATE, UPDATE + BACKWARD + "        scaler.step(other)\n" + UPDATE)],
        ),
    ],
    "AMP006": [
        (
            "typical_training",
            [WINDOW, (STEP, AT_END + STEP)],
            [WINDOW, (STEP + UPDATE, AT_END + STEP + "    " + UPDATE)],
        ),
        ("typical_training", [WINDOW, (UPDATE, AT_END + UPDATE)], [WINDOW, (STEP + UPDATE, AT_END + STEP + "    " + UPDATE)]),
    ],
    "AMP007": [
        ("typical_training", [(STEP, UNSCALE + UNSCALE + STEP)], [(STEP, UNSCALE + STEP)]),
        ("typical_training", [(UPDATE, UNSCALE + UPDATE)], [(STEP, "        scaler.clip_grad_norm_(optimizer, 1.0)\n" * 2 + STEP)]),
        (
            "typical_training",
            [WINDOW, (STEP + UPDATE, UNSCALE + AT_END + STEP + "    " + UPDATE)],
            [WINDOW, (STEP + UPDATE, AT_END + UNSCALE + "    " + STEP + "    " + UPDATE)],
        ),
    ],
    "AMP008": [
        ("typical_training", [(BACKWARD, "    " + BACKWARD)], [(LOSS, LOSS + "            loss = 2 * loss\n")]),
        ("typical_training", [(BACKWARD, "            scaled = scaler.scale(loss)\n            scaled.backward()\n")], [(BACKWARD, "            scaled = scaler.scale(loss)\n        scaled.backward()\n")]),
    ],
    "AMP009": [
        (
            "typical_training",
            [("import cross_entropy", "import binary_cross_entropy"), ("loss = cross_entropy", "loss = binary_cross_entropy")],
            [("import cross_entropy", "import binary_cross_entropy_with_logits as bce"), ("loss = cross_entropy", "loss = bce")],
        ),
        (
            "typical_training",
            [(OPTIMIZER, OPTIMIZER + "    measure = torch.nn.BCELoss()\n"), ("loss = cross_entropy", "loss = measure")],
            [(OPTIMIZER, OPTIMIZER + "    measure = torch.nn.BCELoss()\n"), (BACKWARD, "        loss = measure(loss.float(), labels)\n" + BACKWARD)],
        ),
    ],
    "AMP010": [
        ("typical_training", [(OPTIMIZER, "    model.half()\n" + OPTIMIZER)], [(OPTIMIZER, "    teacher.half()\n" + OPTIMIZER)]),
        ("typical_training", [(OPTIMIZER, "    model = model.to(torch.bfloat16)\n" + OPTIMIZER)], [(OPTIMIZER, "    model = model.to(torch.float32)\n" + OPTIMIZER)]),
    ],
    "AMP011": [
        ("typical_training", [*NO_SCALER, FP16], [*NO_SCALER, BF16]),
    ],
    "AMP012": [
        ("typical_training", [BF16, (SCALER, "scaler = GradScaler()")], [FP16, (SCALER, "scaler = GradScaler()")]),
        ("typical_training", [BF16, (SCALER, 'scaler = GradScaler("cuda")')], [BF16]),
    ],
    "AMP013": [
        ("typical_training", [(TORCH[0], "from torch.cuda.amp import GradScaler, autocast"), (REGION, "region = autocast(enabled=True)"), (SCALER, "scaler = GradScaler()")], [TORCH]),
        ("typical_training", [("autocast(config.device", "torch.cpu.amp.autocast(config.device")], [("autocast(config.device", "torch.amp.autocast(config.device")]),
    ],
    "AMP014": [
        (
            "typical_training",
            [FP16, ("cross_entropy(model(images), labels)", "(images @ images.T).masked_fill(labels, -1e9).mean()")],
            [FP16, ("cross_entropy(model(images), labels)", "(images @ images.T).masked_fill(labels, float('-inf')).mean()")],
        ),
        (
            "typical_training",
            [FP16, ("cross_entropy(model(images), labels)", "images / ((images @ images.T) + 1e-8)")],
            [FP16, ("cross_entropy(model(images), labels)", "images / ((images @ images.T) + 1e-6)")],
        ),
    ],
    "AMP015": [
        (
            "typical_training",
            [(UPDATE, UPDATE + "        torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, 'last.pt')\n")],
            [(UPDATE, UPDATE + "        torch.save({'optimizer': optimizer.state_dict(), 'scaler': scaler.state_dict()}, 'last.pt')\n")],
        ),
        (
            "typical_training",
            [(UPDATE, UPDATE + "        kept = dict(optimizer=optimizer.state_dict())\n        torch.save(kept, 'last.pt')\n")],
            [(UPDATE, UPDATE + "        torch.save(model.state_dict(), 'last.pt')\n")],
        ),
    ],
    "AMP016": [
        (
            "typical_training",
            [(OPTIMIZER, OPTIMIZER + "    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 9)\n"), (UPDATE, UPDATE + "        schedule.step()\n")],
            [(OPTIMIZER, OPTIMIZER + "    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 9)\n"), (UPDATE, UPDATE + "        if scaler.get_scale() >= before:\n            schedule.step()\n")],
        ),
        (
            "typical_training",
            [(UPDATE, "        lr_scheduler.step()\n" + UPDATE)],
            [("    record.seconds", "    lr_scheduler.step()\n    record.seconds")],
        ),
        (
            "typical_training",
            [(STEP, "        lr_scheduler.step()\n" + STEP)],
            [(STEP, "        if late:\n            lr_scheduler.step()\n" + STEP)],
        ),
    ],
    "AMP017": [
        (
            "threads",
            [("    with region:\n        net = autocast_module(net)\n", "    pool = ThreadPoolExecutor(2)\n"), ("logits = model(images)", "logits = pool.submit(model, images).result()")],
            [("    with region:\n        net = autocast_module(net)\n", "    pool = ThreadPoolExecutor(2)\n"), ("        with region:\n            logits", "        pool.submit(model, images)\n        with region:\n            logits")],
        ),
        ("threads", [BF16, ("    with region:\n        net = autocast_module(net)\n    model = nn.DataParallel(net) if config.device == \"cuda\" else InThreads(net, config.workers)", "    model = nn.DataParallel(net)")], [FP16, ("    with region:\n        net = autocast_module(net)\n    model = nn.DataParallel(net) if config.device == \"cuda\" else InThreads(net, config.workers)", "    model = nn.DataParallel(net)")]),
    ],
    "AMP018": [
        ("custom_functions", [("    @custom_fwd\n", ""), ("    @custom_bwd\n", "")], [("@custom_fwd\n", "@torch.amp.custom_fwd(device_type='cuda')\n")]),
    ],
    "AMP019": [
        ("typical_training", [(REGION, 'region = autocast("cpu", torch.float16)'), (SCALER, "scaler = GradScaler()")], [(REGION, 'region = autocast("cpu", torch.float16)'), (SCALER, 'scaler = GradScaler("cpu")')]),
    ],
}  # fmt: skip
ROWS = [
    pytest.param(code, *twin, id=f"{code}-{number}")
    for code, twins in TWINS.items()
    for number, twin in enumerate(twins)
]


@pytest.mark.parametrize(("code", "recipe", "wrong", "right"), ROWS)
def test_the_wrong_twin_is_found_and_the_right_one_is_clean(code, recipe, wrong, right):
    assert {*codes(read(recipe, *wrong))} == {code}
    assert codes(read(recipe, *right)) == []


EPOCHS = """
import torch
scaler = torch.amp.GradScaler("cuda")
for epoch in range(3):
    for {target} in batches:
        scaler.scale(model(batch)).backward()
        {step}
    scaler.update()
"""


@pytest.mark.parametrize(
    ("target", "step", "found"),
    [
        ("batch", "scaler.step(opt)", True),
        ("batch", "scaler.unscale_(opt); scaler.step(opt); opt.zero_grad()", True),
        ("batch", "if use_amp: scaler.step(opt)", True),
        ("batch", "if number % 4 == 3: scaler.step(opt)", False),
        ("batch", "if is_end: scaler.step(opt)", False),
        ("batch", "scaler.step(opt)\n        break", False),
        ("batch", "scaler.step(opt); finish(scaler)", False),
        ("batch", "pass\n    scaler.step(opt)", False),
        ("batch, opt", "scaler.step(opt)", False),
        ("batch", "scaler.step(opt); scaler.update()", False),
        ("batch", "opt = optimizers[batch]; scaler.step(opt)", False),
    ],
)
def test_an_update_outside_of_the_loop_that_steps(target, step, found):
    assert codes(EPOCHS.format(target=target, step=step)) == ["AMP004"] * found


AHEAD = """
import torch
scaler = torch.amp.GradScaler("cuda")
sched = torch.optim.lr_scheduler.StepLR(opt, 9)
for epoch in range(3):
    {epoch}
    for number, batch in enumerate(batches):
        {first}
        scaler.scale(model(batch)).backward()
        {second}
        scaler.step(opt)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("place", "line", "found"),
    [
        ("first", "sched.step()", True),
        ("second", "sched.step()", True),
        ("second", "scaler.unscale_(opt); sched.step()", True),
        ("epoch", "sched.step()", False),
        ("first", "if number > 0: sched.step()", False),
        ("first", "opt_d.step(); sched.step()", False),
        ("first", "sched.step(number)", False),
        ("first", "if number % 4 == 0: sched.step()", False),
    ],
)
def test_a_scheduler_that_steps_before_the_scaler(place, line, found):
    lines = dict.fromkeys(("epoch", "first", "second"), "pass") | {place: line}
    assert codes(AHEAD.format(**lines)) == ["AMP016"] * found


def test_each_rule_has_twins_texts_and_a_section_of_the_page():
    assert list(TWINS) == list(MISTAKES)
    page = (ROOT / "docs/reference/check_rules.md").read_text()
    headings = re.findall(r"^## (AMP\d+) (\S+)$", page, re.MULTILINE)
    assert headings == [(code, mistake.name) for code, mistake in MISTAKES.items()]


PRELUDE = """
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from concurrent.futures import ThreadPoolExecutor
criterion = torch.nn.MSELoss()
{scaler}
optimizer = torch.optim.AdamW(others)
first = second = optimizer
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 9)
accelerator, pool = Accelerator(mixed_precision=precision), ThreadPoolExecutor(2)
q = batch @ batch.mT
with torch.autocast("cuda", torch.float16):
    y = Product.apply(batch, weight) if "Product" in globals() else None
for number, (batch, target) in enumerate(loader):
"""


@pytest.mark.parametrize("code", MISTAKES)
def test_the_examples_of_the_page_are_wrong_and_right(code):
    page = (ROOT / "docs/reference/check_rules.md").read_text()
    section = page.partition(f"## {code} ")[2].partition("\n##")[0]
    wrong, right = re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    scaler = (
        "" if code in {"AMP011", "AMP012", "AMP019"} else "scaler = torch.amp.GradScaler('cuda', enabled=on)"
    )
    prelude = PRELUDE.format(scaler=scaler)
    if code in {"AMP011", "AMP012", "AMP019"}:
        prelude = re.sub(r"with torch.autocast.*\n.*\n|.*ccelerat.*\n", "", prelude)
    program = [prelude + "".join(f"    {line}\n" for line in text.splitlines()) for text in (wrong, right)]
    assert [code in codes(text) for text in program] == [True, False]


def test_the_recipes_the_package_and_the_tour_are_clean():
    report = check([ROOT / "recipes", ROOT / "amp_plugin", ROOT / "docs"], Settings())
    assert (report.found, report.faults) == ([], {})
    assert report.files > 150


# The examples of torch's page on automatic mixed precision, in our own words.
TORCHS_EXAMPLES = {
    "typical": "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()",
    "clipping": "scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    scaler.step(optimizer)\n    scaler.update()",
    "accumulation": "scaler.scale(loss / 4).backward()\n    if (number + 1) % 4 == 0:\n        scaler.step(optimizer)\n        scaler.update()\n        optimizer.zero_grad()",
    "accumulation, clipping": "scaler.scale(loss / 4).backward()\n    if (number + 1) % 4 == 0:\n        scaler.unscale_(optimizer)\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        scaler.step(optimizer)\n        scaler.update()\n        optimizer.zero_grad()",
    "penalty": "grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)\n    inverse = 1.0 / scaler.get_scale()\n    grads = [grad * inverse for grad in grads]\n    with autocast('cuda', dtype=torch.float16):\n        loss = loss + sum(grad.pow(2).sum() for grad in grads).sqrt()\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()",
    "two losses": "scaler.scale(loss).backward(retain_graph=True)\n    scaler.scale(3 * loss).backward()\n    scaler.unscale_(optimizer)\n    scaler.step(optimizer)\n    scaler.step(other)\n    scaler.update()",
}  # fmt: skip


@pytest.mark.parametrize("name", TORCHS_EXAMPLES)
def test_the_examples_of_torchs_documentation_are_clean(name):
    text = f"""
import torch
from torch.amp import GradScaler, autocast
model = torch.nn.Linear(2, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")
for number, (batch, target) in enumerate(data):
    with autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(model(batch), target)
    {TORCHS_EXAMPLES[name]}
"""
    assert codes(text) == []


# Programs that look wrong and may be right. If the check is not sure, it says nothing.
UNSURE = {
    "the clip is unscaled by a helper": "scaler.scale(loss).backward()\n    unscale(scaler, optimizer)\n    clip(p, 1.0)\n    scaler.step(optimizer)\n    scaler.update()",
    "two ways through the iteration": "if scaler is not None:\n        scaler.scale(loss).backward()\n    else:\n        loss.backward()\n    if scaler is None:\n        clip(p, 1.0)\n        optimizer.step()\n    else:\n        scaler.step(optimizer)\n        scaler.update()",
    "the early way out": "if not use_amp:\n        loss.backward()\n        optimizer.step()\n        continue\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()",
    "a clip of the other way": "if fp16 and scaler:\n        scaler.scale(loss).backward()\n    else:\n        loss.backward()\n    if not fp16:\n        clip(p, 1.0)\n    if fp16 and scaler:\n        scaler.step(optimizer)\n        scaler.update()\n    else:\n        optimizer.step()",
    "a clip that bounds nothing": "scaler.scale(loss).backward()\n    norm = clip(p, float('inf'))\n    scaler.step(optimizer)\n    scaler.update()",
    "two models in turn": "for name in names:\n        scaler.scale(losses[name]).backward()\n        scaler.step(optimizers[name])\n        scaler.update()",
}  # fmt: skip


@pytest.mark.parametrize("name", UNSURE)
def test_it_is_silent_where_the_program_may_be_right(name):
    text = f"""
import torch
from torch.nn.utils import clip_grad_norm_ as clip
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
for batch in data:
    loss = model(batch)
    {UNSURE[name]}
"""
    assert codes(text) == []


def test_a_clip_on_both_ways_through_an_iteration_is_found():
    text = """
import torch
for number, batch in enumerate(data):
    loss = model(batch)
    if fp16 and scaler is not None:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    if (number + 1) % 4 == 0:
        if bound > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
        if fp16 and scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
"""
    assert codes(text) == ["AMP001"]


def test_names_are_followed_through_attributes_arguments_and_local_functions():
    text = """
import torch
import torch.nn.utils as utils
from torch.amp import GradScaler as Scaler

class Trainer:
    def __init__(self, model):
        self.model = model
        self.scaler = Scaler("cuda") if torch.cuda.is_available() else None
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, loss):
        scaled = self.scaler.scale(loss)
        scaled.backward()
        utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

def train(model, scale_of_loss, opt, loss):
    scale_of_loss.scale(loss).backward()
    opt.step()

train(model, Scaler(), torch.optim.SGD(model.parameters()), loss)
"""
    assert codes(text) == ["AMP001", "AMP002"]


# Loops as people write them, each with the rules that report it. For each one, the rules were wrong at some
# time.
SHAPES = {
    "the scheduler is given the epoch": (
        "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    scheduler.step(epoch)",
        [],
    ),
    "the scheduler steps at the end of an epoch": (
        "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    if number + 1 == len(data):\n        scheduler.step()",
        [],
    ),
    "the scheduler steps every hundredth iteration": (
        "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    if number % 100 == 99:\n        scheduler.step()",
        [],
    ),
    "the scale is printed, and the scheduler is not guarded": (
        "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    scheduler.step()\n    print(scaler.get_scale())",
        ["AMP016"],
    ),
    "a skipped step leaves the iteration": (
        "scaler.scale(loss).backward()\n    before = scaler.get_scale()\n    scaler.step(optimizer)\n    scaler.update()\n    if scaler.get_scale() < before:\n        continue\n    scheduler.step()",
        [],
    ),
    "the rest of an epoch's window steps before the scheduler": (
        "scaler.scale(loss).backward()\n    if number % 4 == 3:\n        scaler.step(optimizer)\n        scaler.update()\nif number % 4 != 3:\n    scaler.step(optimizer)\n    scaler.update()\nscheduler.step()",
        [],
    ),
    "a second loss in every tenth iteration": (
        "scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n    scaler.step(optimizer)\n    scaler.update()\n    if number % 10 == 0:\n        scaler.scale(penalty).backward()\n        scaler.unscale_(optimizer)\n        scaler.step(optimizer)\n        scaler.update()",
        [],
    ),
    "several optimizers, and a scheduler": (
        "scaler.scale(loss).backward()\n    for each in optimizers:\n        scaler.step(each)\n    scaler.update()\n    scheduler.step()",
        ["AMP016"],
    ),
    "several schedulers": (
        "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    for schedule in schedules:\n        schedule.step()",
        ["AMP016"],
    ),
    "the scheduler steps after a loop over micro-batches": (
        "for part in batch:\n        scaler.scale(model(part)).backward()\n        scaler.step(optimizer)\n        scaler.update()\n    scheduler.step()",
        [],
    ),
    "the scheduler has a short name": (
        "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    if sch:\n        sch.step()\n    scaler.update()",
        ["AMP016"],
    ),
    "two optimizers, and one of them steps more rarely": (
        "scaler.scale(first).backward()\n    scaler.step(optimizer)\n    if number % 5 == 0:\n        scaler.scale(loss).backward()\n        scaler.step(other)\n    scaler.update()",
        [],
    ),
    "two optimizers in one window, the first of them on request": (
        "scaler.scale(loss).backward()\n    if number % 4 == 3 and both:\n        scaler.unscale_(other)\n    if number % 4 == 3:\n        scaler.step(optimizer)\n        scaler.update()\n    if number % 4 == 3 and both:\n        scaler.scale(loss).backward()\n        scaler.step(other)\n        scaler.update()",
        [],
    ),
    "a bad loss is skipped with an update": (
        "if not torch.isfinite(loss):\n        optimizer.zero_grad()\n        scaler.update()\n        continue\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()",
        ["AMP006"],
    ),
    "a bad loss is skipped with a smaller scale": (
        "if not torch.isfinite(loss):\n        optimizer.zero_grad()\n        scaler.update(1024.0)\n        continue\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()",
        [],
    ),
    "bad gradients are skipped with an update": (
        "scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n    if not finite(parameters):\n        optimizer.zero_grad()\n        scaler.update()\n        continue\n    scaler.step(optimizer)\n    scaler.update()",
        [],
    ),
    "the backward pass has a plain one in reserve": (
        "try:\n        scaler.scale(loss).backward()\n    except RuntimeError:\n        loss.backward()\n    torch.nn.utils.clip_grad_norm_(parameters, 1.0)\n    scaler.step(optimizer)\n    scaler.update()",
        ["AMP001"],
    ),
    "a clip of the plain backward pass in reserve": (
        "try:\n        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n    except RuntimeError:\n        loss.backward()\n        torch.nn.utils.clip_grad_norm_(parameters, 1.0)\n        optimizer.step()\n    scaler.update()",
        [],
    ),
    "the checkpoint of a scaler that another module makes": (
        "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, 'last.pt')",
        ["AMP015"],
    ),
    "a function that saves the optimizer without the scaler": (
        "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    save_checkpoint('last.pt', model, optimizer)",
        ["AMP015"],
    ),
    "a function that saves both": (
        "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    save_checkpoint('last.pt', model, optimizer, amp=scaler)",
        [],
    ),
    "a method that saves an object which may own the scaler": (
        "scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    self.save_checkpoint('last.pt', optimizer)",
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_of_a_loop_is_found_or_left_alone(name):
    loop, expected = SHAPES[name]
    text = f"""
import torch

def train(model, optimizer, other, scaler, scheduler, sch, data, epoch, both, parameters):
    for number, batch in enumerate(data):
        loss = model(batch)
        {loop.replace(chr(10), chr(10) + "    ")}
"""
    assert codes(text) == expected


def test_a_method_that_steps_scaler_and_scheduler_is_found():
    text = """
import torch

class Precision:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self, optimizer, scheduler=None):
        self.scaler.step(optimizer)
        self.scaler.update()
        if scheduler is not None:
            scheduler.step()
"""
    assert codes(text) == ["AMP016"]


@pytest.mark.parametrize(("made", "expected"), [("torch.amp.GradScaler()", ["AMP019"]), ("torch.cuda.amp.GradScaler()", ["AMP013", "AMP019"]), ("torch.cpu.amp.GradScaler()", ["AMP013"]), ("torch.amp.GradScaler(enabled=False)", [])])  # fmt: skip
def test_a_scaler_is_for_cuda_by_default_only(made, expected):
    text = f"""
import torch
scaler = {made}
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(batch)
scaler.scale(loss).backward()
"""
    assert codes(text) == expected


def test_a_function_that_writes_the_optimizer_of_another_module_is_found():
    text = """
import torch

def train(scaler, optimizer, loss):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

def save(path, model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
"""
    assert codes(text) == ["AMP015"]
    assert codes(text.replace("optimizer.state_dict()", "options.to_dict()")) == []
    assert (
        codes(
            text.replace("path, model, optimizer)", "path, model, optimizer, scaler)").replace(
                '"model":', '"scaler": scaler.state_dict(), "model":'
            )
        )
        == []
    )


def test_a_scaler_that_says_it_is_enabled_is_enabled():
    text = """
import torch
scaler = torch.amp.GradScaler("cuda", enabled={})
for batch in data:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    assert [codes(text.format(value)) for value in ("True", "use_amp", "False")] == [["AMP012"], [], []]


METHODS = {
    "the method unscales": ("    def prepare(self):\n        self.scaler.unscale_(self.optimizer)", "object", []),
    "the method asks another one": ("    def prepare(self):\n        self.inner()\n\n    def inner(self):\n        self.scaler.unscale_(self.optimizer)", "object", []),
    "the method does not unscale": ("    def prepare(self):\n        self.count += 1", "object", ["AMP001"]),
    "the method is inherited": ("    count = 0", "Base", []),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_a_method_between_backward_and_clip_may_unscale(name):
    method, base, expected = METHODS[name]
    text = f"""
import torch
from other import Base

class Trainer({base}):
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

{method}

    def train(self):
        for batch in self.data:
            self.scaler.scale(self.model(batch)).backward()
            self.prepare()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""
    assert codes(text) == expected


def test_errors_at_run_time_say_what_the_rules_say():
    scaler = amp_plugin.GradScaler("cpu")
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.register(optimizer)
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        with pytest.raises(RuntimeError, match=re.escape(MISTAKES["AMP002"].what)):
            optimizer.step()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=re.escape(MISTAKES["AMP007"].instead)):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=re.escape(MISTAKES["AMP007"].instead)):
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=re.escape(MISTAKES["AMP004"].instead)):
            scaler.step(optimizer)
        scaler.update()
    assert (
        MISTAKES["AMP001"].instead_with("self.scaler", "adam")
        == "call self.scaler.unscale_(adam) before the clip"
    )
