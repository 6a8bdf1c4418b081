"""Train a small GPT that writes character by character: copy this file, and put your text in.

    python char_gpt.py                            one process, no MPI needed
    hvdlaunch run -np 2 -- python char_gpt.py --run a   two ranks; the same again resumes the run if it was interrupted
    hvdlaunch run -np 2 -- python char_gpt.py --stages 2 --accumulate-steps 4 --batch-size-per-rank 8   half of it each

The result by 2 ranks on 2 CPU cores: 2.05 to 2.07 bits per character of the test (3 seeds), in 2 to 3.5 minutes.
"""

from dataclasses import dataclass
from math import log
from pydoc_data.topics import topics

import torch
from torch import nn

import hvdtrain


@dataclass(frozen=True, kw_only=True)
class Settings(hvdtrain.Settings):
    """A small GPT on the language reference that comes with Python."""

    epochs: int = 5
    batch_size_per_rank: int = 16
    optimizer: str = "adamw"
    lr: float | None = 0.01  # of a batch of 256; others follow its square root
    context: int = 64  # characters that the model sees
    layers: int = 4
    width: int = 64  # of a layer: 16 for each of its heads


class Embedding(nn.Module):
    def __init__(self, alphabet, context, width):
        super().__init__()
        self.characters, self.places = nn.Embedding(alphabet, width), nn.Embedding(context, width)

    def forward(self, text):  # (N, T) to (N, T, width)
        return self.characters(text) + self.places.weight[: text.shape[1]]


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.to_heads, self.from_heads = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.norm, self.mlp_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, hidden):  # (N, T, size)
        heads = self.to_heads(self.norm(hidden)).unflatten(2, (3, -1, 16)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)  # (N, heads, T, 16)
        hidden = hidden + self.from_heads(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


class NextCharacter(hvdtrain.Task):
    best, means = "bits", ("bits",)  # per character; fewer are better

    def loss(self, model, batch, *, training):
        scores, then = model(batch["inputs"]), batch["targets"]  # (N, T, alphabet), (N, T)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), then.flatten(), reduction="sum") / then.shape[1]
        return hvdtrain.Sums(loss=loss, count=loss.new_full((), len(then)), more={"bits": loss.detach() / log(2)})


def main(run: hvdtrain.Run[Settings]) -> None:
    context, width = run.settings.context, run.settings.width
    text = "\n".join(topics.values())
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(character) for character in text])
    windows = codes.unfold(0, context + 1, context)  # with the character after each; the last tenth is the test
    train, test = ((part[:, :-1], part[:, 1:]) for part in windows.tensor_split([len(windows) * 9 // 10]))

    def build():
        layers = [Layer(width) for _ in range(run.settings.layers)] + [nn.LayerNorm(width)]
        # --stages cuts a Sequential between its children.
        return nn.Sequential(Embedding(len(alphabet), context, width), *layers, nn.Linear(width, len(alphabet)))

    training = run.training(build, NextCharacter(), train, test)
    for _ in training:
        pass
    if weights := training.gather_model():  # on rank 0, all of them, also with --stages
        model, written = build(), codes[:1]
        model.load_state_dict(weights)
        for _ in range(300):
            written = torch.cat([written, model(written[None, -context:])[0, -1].softmax(0).multinomial(1)])
        training.say("".join(alphabet[code] for code in written))


if __name__ == "__main__":
    hvdtrain.start(main, Settings)
