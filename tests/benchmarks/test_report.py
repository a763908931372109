"""Figures as JSON, and the machine's name."""

import json
import socket
from dataclasses import replace

import torch

from benchmarks.report import RESULTS, Report, processor


def test_json_gives_the_same_report_back_in_six_digits(report):
    assert Report.from_json(report.to_json()) == report
    assert report.path == RESULTS / "some-cpu-2-cores-2.13.0+cpu.json"
    noisy = replace(report, sections={"x": replace(report.sections["models"], seconds=1 / 3)})
    assert json.loads(noisy.to_json())["sections"]["x"]["seconds"] == 0.333333


def test_this_machine_is_named_without_its_host_name():
    here = Report.here("cpu")
    assert here.torch == torch.__version__
    assert here.machine == processor()
    assert here.machine.endswith(" cores")
    assert socket.gethostname() not in here.to_json()
