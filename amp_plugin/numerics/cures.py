"""The names by which rules reach an op, and lines to paste that compute in fp32."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Container, Sequence

from amp_plugin.casting.op_names import names_an_op
from amp_plugin.numerics.finding import Cure
from amp_plugin.numerics.modules import ModuleAddress

# Loaded as soon as a plugin is made; the package itself also by `amp-plugin run`, whatever the program uses.
_PLUGINS = {f"amp_plugin.adapters.lightning.for_{package}" for package in ("lightning", "pytorch_lightning")}

# What runs -> the ops by which a program may have called it. Autocast looks at the outermost one.
_CALLED_AS = {
    "addmm": ("linear", "addmm"),
    "bmm": ("matmul", "bmm"),
    "convolution": ("conv1d", "conv2d", "conv3d"),
    "convolution transposed": ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "dot": ("matmul", "dot"),
    "linalg_vector_norm": ("norm", "linalg_vector_norm"),
    "mm": ("linear", "matmul", "mm"),
    "mv": ("matmul", "mv"),
}
# Of others, what runs within the op that was called: _softmax, native_layer_norm, nll_loss_forward.
_WITHIN = re.compile(r"^_?(?:native_)?|_forward$")


def callers_of(op: str, *, is_transposed: bool = False) -> tuple[str, ...]:
    """Return the names to give a rule to, so that it reaches an op however the program called it.

    ``aten::bmm.default`` gives ``("aten::matmul", "aten::bmm")``, most ops their own name. None for casts,
    in-place forms, which keep the dtype of what they write into, and for autograd functions.
    """
    namespace, _, rest = op.partition("::")
    packet = rest.split(".")[0]
    if packet.endswith("_") or packet == "_to_copy":
        return ()
    called = "scaled_dot_product_attention" if "_scaled_dot_product" in packet else _WITHIN.sub("", packet)
    callers = _CALLED_AS.get(f"{packet} transposed" if is_transposed else packet, (called,))
    names = filter(names_an_op, (f"{namespace}::{name}" for name in callers))
    return tuple(names) or tuple(filter(names_an_op, [f"{namespace}::{packet}"]))


def cures_of(
    module: ModuleAddress, rule_names: Sequence[str], device_type: str, loaded: Container[str] = sys.modules
) -> tuple[Cure, ...]:
    """Return the ways to compute an op in fp32, as the program's front door takes them.

    For the outermost module there is none: nothing would stay in 16 bits.
    """
    changes = "".join(f'.with_rule("{name}", "fp32")' for name in rule_names)
    rules = f'amp_plugin.OpRules.default("{device_type}"){changes}'
    option = "import amp_plugin\namp_plugin.{}={})"
    fp32_modules = f'["*{module.path}"]'
    if any(plugins in loaded for plugins in _PLUGINS):
        place = everywhere = (
            "Lightning, options of the plugin (in Fabric FabricAmpPrecision), next to those it has"
        )
        code = option.format('AmpPrecision("fp16", fp32_modules', fp32_modules)
        rules_code = option.format('AmpPrecision("fp16", rules', rules)
    elif "amp_plugin.adapters.accelerate" not in loaded:
        place = f"after the line that makes the model; model is your {module.model}"
        everywhere = "once, before the training begins"
        inner = f'model.get_submodule("{module.path}")'
        code = f"import amp_plugin, torch\namp_plugin.run_in(torch.float32)({inner})"
        rules_code = f"import amp_plugin\namp_plugin.set_default_rules({rules})"
    elif "transformers.trainer" in loaded or "ACCELERATE_MIXED_PRECISION" in os.environ:
        place = everywhere = "in the shell, before the program is started"  # they make their own Accelerator
        code = f"export AMP_PLUGIN_FP32_MODULES='{module.path}'"
        entries = "".join(f"\\n  {name}: fp32" for name in rule_names)
        file = f"printf 'device_type: {device_type}\\nrules:{entries}\\n' > rules.yaml"
        rules_code = f"{file}\nexport AMP_PLUGIN_RULES=rules.yaml"
    else:
        place = everywhere = "Accelerate, an option in kwargs_handlers, next to those it has"
        code = option.format("AmpKwargs(fp32_modules", fp32_modules)
        rules_code = option.format("AmpKwargs(rules", rules)
    of_module = Cure(place=f"the module in fp32: {place}", code=code)
    of_ops = Cure(place=f"{' and '.join(rule_names)} in fp32, in all modules: {everywhere}", code=rules_code)
    return (*([of_module] if module.path else []), *([of_ops] if rule_names else []))
