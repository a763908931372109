"""Moving code changes no public name, parameter, default or state key."""

import json

from tests.public_interface import FILE, interface

_REMEDY = "if this change is intended, run `python -m tests.public_interface` and describe it in CHANGELOG.md"


def test_what_programs_use_is_as_it_is_written_down():
    written, present = json.loads(FILE.read_text()), json.loads(json.dumps(interface()))
    for part in ("names", "states"):
        assert present[part] == written[part], _REMEDY
