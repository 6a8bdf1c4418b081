from types import SimpleNamespace

import pytest
import torch

from hvdtrain.parallel.elastic.settings import ElasticSettings
from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.vision import settings as images
from tests.refusals import refused


def test_a_least_number_of_ranks_is_for_an_elastic_run():
    assert refused(lambda: images.parse(["--min-np", "2"])) == "--min-np 2 requires --elastic."
    assert refused(lambda: images.parse(["--min-np", "2", "--grow"])) == "--min-np 2 with --grow requires --elastic."


def test_an_elastic_run_is_on_cpus():
    on_gpu, on_cpu = (SimpleNamespace(device=torch.device(kind)) for kind in ("cuda", "cpu"))
    ElasticSettings(elastic=True).check_job(on_cpu)
    ElasticSettings().check_job(on_gpu)
    line = refused(lambda: ElasticSettings(elastic=True).check_job(on_gpu))
    assert line.startswith("--elastic works on CPUs only")
    assert "hvdlaunch run --restarts 5" in line


@pytest.mark.parametrize(
    ("facts", "settings"), [("{}", (False, 1, False)), ('{"min_np": 3, "grow": true}', (True, 3, True))]
)
def test_the_launcher_says_whether_a_run_is_elastic(monkeypatch, facts, settings):
    monkeypatch.setenv("HVDLAUNCH_RANK", facts)
    config = texts.parse([])
    assert (config.elastic, config.min_np, config.grow) == settings


@pytest.mark.parametrize("text", ["", "1", "[" * 100_000, '{"min_np": "3"}', '{"min_np": 3, "grow": 1}'])
def test_a_variable_that_hvdlaunch_has_not_set_is_refused(monkeypatch, text):
    monkeypatch.setenv("HVDLAUNCH_RANK", text)
    assert refused(lambda: texts.parse([])) == "HVDLAUNCH_RANK: not the JSON that hvdlaunch sets. Unset it."
