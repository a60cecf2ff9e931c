"""Problem sets by the name a run YAML gives them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from sprawl.config import Section
from sprawl.config_files import describe_validation_error
from sprawl.errors import ConfigError
from sprawl.problems.addition import Addition, AdditionParams
from sprawl.problems.arithmetic import Arithmetic, ArithmeticParams
from sprawl.problems.base import ProblemSet
from sprawl.problems.calculator import Calculator, CalculatorParams

# name -> (model of problems.params, constructor of (seed, params))
KNOWN: dict[str, tuple[type[Section], Callable[[int, Any], ProblemSet]]] = {
    Addition.name: (AdditionParams, Addition),
    Arithmetic.name: (ArithmeticParams, Arithmetic),
    Calculator.name: (CalculatorParams, Calculator),
}


def load_problem_set(name: str, seed: int, params: Mapping[str, Any]) -> ProblemSet:
    """The problem set `name`. Raises ConfigError for an unknown name or for params it does not take."""
    if name not in KNOWN:
        close = difflib.get_close_matches(name, KNOWN, n=1)
        fix = (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(sorted(KNOWN))}"
        raise ConfigError(f"problems.name: there is no problem set {name!r}", fix)
    model, construct = KNOWN[name]
    source = f"problems.params of {name}"
    try:
        checked = model.model_validate(dict(params))
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, model, source)) from None
    problem_set = construct(seed, checked)
    if not problem_set.heldout(1):
        raise ConfigError(f"{source}: 'heldout_share' is so small that no problem is held out")
    return problem_set
