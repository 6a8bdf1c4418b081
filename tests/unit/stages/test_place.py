from types import SimpleNamespace

import pytest
import torch

from hvdtrain.core.blocks import Cuts
from hvdtrain.core.phases import OFF
from hvdtrain.stages import place
from tests.ranks import Rank
from tests.unit.stages.test_blocks import effnet


class Stage(Rank):
    """Rank 0 of a replica of two."""

    replica = property(lambda _: Rank(0, 2))


@pytest.mark.parametrize(
    ("cuts", "recorded", "cut"),
    [((6,), [5], [6]), (None, [5], [5]), (None, [2, 5], [3])],  # three stages have saved the last: cut anew
)
def test_stages_are_cut_as_asked_or_as_in_the_checkpoint_of_as_many(monkeypatch, cuts, recorded, cut):
    monkeypatch.setattr(place, "join_replica_on_all", lambda *_, **__: None)
    monkeypatch.setattr("hvdtrain.stages.stage.choose_cuts", lambda *_: (3,))
    model, blocks, inputs = effnet()
    job = SimpleNamespace(
        comm=Stage(0, 2),
        cuts=Cuts(blocks=blocks),
        resumed={"stages_at": recorded},
        device=torch.device("cpu"),
        is_shared=True,
        precision="fp32",
        model=model,
        example=lambda: inputs,
        phases=OFF,
        give_values=None,
    )
    layout = place.make_stages(job, cuts=cuts, order="1f1b", recompute=False)
    assert layout.about == {"stages_at": cut}
