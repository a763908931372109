"""The report's figures as JSON, and the name of the machine."""

import json
import socket
from dataclasses import replace

import torch

from benchmarks import published
from benchmarks import report as reports
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


def test_what_a_gpu_has_kept_is_published(report, tmp_path, monkeypatch, capsys):
    """The file has figures and parts. If it has no figures, it is refused with a reason."""
    pages = []
    monkeypatch.setattr(reports, "RESULTS", tmp_path)
    monkeypatch.setattr(published, "write", pages.append)
    part = {"name": "first-ops", "verdict": "passed: 1 passed", "seconds": 8.0}
    ran = replace(report, device="cuda", machine="Some GPU", parts=[part])
    file = tmp_path / "gpu.json"
    file.write_text(ran.to_json())
    assert published.main([str(file)]) == 0
    assert pages == [ran]
    assert Report.from_json((tmp_path / "some-gpu-2.13.0+cpu.json").read_text()).parts == [part]
    file.write_text('{"machine": "Some GPU", "sections": {}, "parts": []}')
    assert published.main([str(file)]) == 1
    assert "no section of the benchmarks has run to its end" in capsys.readouterr().err
