"""Updates, saved states, copies, and which optimizers and parameters there are."""

from __future__ import annotations

from tests.fuzz.model import NO, YES
from tests.fuzz.predictions import error_of_copy, may_meet, may_update
from tests.fuzz.run import NOT_SCALED_YET, Run
from tests.fuzz.scene import params
from tests.fuzz.setups import PARAMS


def update(run: Run) -> None:
    if not run.oracle.used:
        run.scene.run("scaler.update()", YES, NOT_SCALED_YET)
    elif may_update(run.oracle):
        past = run.oracle.last_backward is not None and not run.oracle.known
        if not run.scene.run("scaler.update()", YES if past else NO, "knows no optimizer"):
            run.oracle.update(None)


def set_scale(run: Run, value: float) -> None:
    if run.oracle.used and may_update(run.oracle):
        run.scene.run(f"scaler.update({value})")
        run.oracle.update(value)


def end_iteration(run: Run) -> None:
    run.scene.run("scaler.end_iteration()")
    run.oracle.end_iteration()


def register(run: Run, o: int) -> None:
    if may_meet(run.oracle, o):
        run.scene.run(f"scaler.register(o{o})")
        run.oracle.meet(o)


def add_param_group(run: Run, o: int, index: int) -> None:
    fixed, oracle = ("lbfgs", "two_calls", "takes_gradients"), run.oracle
    if run.kind(o) in fixed or index in run.owned_by(*fixed) or index in run.members(o):
        return
    if oracle.windows[o].folded:
        return
    if o not in oracle.known or may_meet(oracle, o, [index]):
        run.scene.run(f'o{o}.add_param_group({{"params": [p{index}]}})')
        oracle.join(o, index)


def save(run: Run) -> None:
    run.scene.run("saved = scaler.state_dict()")
    run.oracle.end_iteration()
    run.scene.see_state(run.scene["saved"])
    scales = run.oracle.scales
    run.saved = {
        "skipped": run.skipped,
        "rule": (scales.growth_factor, scales.backoff_factor, scales.growth_interval),
        "scales": next(iter(scales.worlds)).scales,
    }


def load(run: Run) -> None:
    if run.saved:
        run.scene.run("scaler.load_state_dict(saved)")
        scales = run.oracle.scales
        scales.load({name: s[:3] for name, s in zip(scales.names, run.saved["scales"], strict=True)})
        scales.growth_factor, scales.backoff_factor, scales.growth_interval = run.saved["rule"]
        run.skipped = run.saved["skipped"]
        for window in run.oracle.windows:  # those of each optimizer are counted from here on
            window.skipped = 0


def set_rule(run: Run, rule: tuple[str, float]) -> None:
    """``set_growth_factor`` and its like; they are the default scale's."""
    name, value = rule
    if len(run.oracle.scales.names) == 1 and run.setup.options.get("dynamic", True):
        run.scene.run(f"scaler.set_{name}({value})")
        setattr(run.oracle.scales, name, value)


def copy(run: Run, pickled: bool) -> None:
    """Go on with a copy, between iterations."""
    if _between_iterations(run):
        _clear_all(run)
        way = "pickle.loads(pickle.dumps(scaler))" if pickled else "copy.deepcopy(scaler)"
        refused = error_of_copy(run.oracle)
        if not run.scene.run(f"scaler = {way}", refused, "may only be pickled at the beginning"):
            _start_anew(run)


def restart(run: Run) -> None:
    """Go on with a new scaler that has loaded the old one's state."""
    if _between_iterations(run):
        _clear_all(run)
        run.scene.run("state = scaler.state_dict()")
        run.oracle.end_iteration()
        run.scene.see_state(run.scene["state"])
        run.scene.make_scaler(run.setup)
        run.scene.run("scaler.load_state_dict(state)")
        _start_anew(run)


def _between_iterations(run: Run) -> bool:
    """Whether nothing is on its way that only the old scaler knows."""
    return run.early is None and not run.owned_by("takes_gradients")


def _clear_all(run: Run) -> None:
    everyone = range(PARAMS)
    run.scene.run(f"for p in ({params(everyone)}): p.grad = None")
    run.oracle.clear(everyone, zeroed=False)


def _start_anew(run: Run) -> None:
    known = sorted(run.oracle.known)
    run.oracle.start_anew()
    for o in known:
        register(run, o)
