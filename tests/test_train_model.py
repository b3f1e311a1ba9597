"""Models: published sizes, seeding, ties, layouts without memory, refusals."""

from __future__ import annotations

import json
import math

import pytest
import torch

from gossamer.core.errors import BadInput
from gossamer.core.tree import numel
from gossamer.train import model as M

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def llama_size(s):
    return s.vocab * s.width * (1 if s.tied else 2) + s.layers * (4 * s.width**2 + 3 * s.width * s.ffn + 2 * s.width) + s.width


@pytest.mark.parametrize("name", M.PRESETS)
def test_sizes(name):
    assert M.parameter_count(name) == llama_size(M.PRESETS[name]) == numel(M.meta_layout(name))
    stated = {"llama-134m": 134.1, "llama-551m": 551.3}
    if name in stated:
        assert round(M.parameter_count(name) / 1e6, 1) == stated[name]
    elif name.startswith("llama-"):
        assert M.parameter_count(name) / 1e6 == pytest.approx(float(name[6:-1]), rel=0.02)


def test_weights_are_a_function_of_the_seed_alone_and_the_callers_random_state_stays():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    a = M.build("tiny", 257, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    b, c = M.build("tiny", 257, seed=1), M.build("tiny", 257, seed=2)
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.ndim < 2 or not torch.equal(p, r), name


def test_residual_projections_are_scaled_by_depth():
    model = M.build(LLAMA, 64, seed=0)
    std = {n: float(p.detach().std()) for n, p in model.named_parameters() if p.ndim == 2}
    for name, s in std.items():
        want = 0.02 / math.sqrt(2 * 8) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        assert s == pytest.approx(want, rel=0.15), name


@pytest.mark.parametrize("spec,embeddings", [("tiny", 1), (GPT2, 2), (LLAMA, 2)])
def test_layout_covers_each_parameter_once_and_knows_embeddings(spec, embeddings):
    model = M.build(spec, 100, seed=0)
    params = M.parameters_of(model)
    assert len({p.data_ptr() for p in params.values()}) == len(params)
    layout = M.layout(model)
    assert layout == M.meta_layout(spec, 100)
    assert [p.name for p in layout] == list(params) and numel(layout) == sum(p.numel() for p in params.values())
    rows = [p for p in layout if p.by_row]
    assert len(rows) == embeddings
    assert all(p.row == params[p.name].shape[1] for p in rows)
    assert all(p.is_contiguous() for p in params.values())


def test_frozen_parameters_are_left_out():
    model = M.build("tiny", 64, seed=0)
    frozen, p = next(iter(model.named_parameters()))
    p.requires_grad_(False)
    assert frozen not in M.parameters_of(model) and frozen not in {part.name for part in M.layout(model)}


def test_any_causal_model_from_a_mapping_a_file_or_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    models = [M.build(spec, 100, seed=4) for spec in (GPT2, tmp_path, str(tmp_path / "config.json"))]
    x = torch.arange(20).view(2, 10)
    outs = [m.eval()(input_ids=x).logits for m in models]
    assert outs[0].shape == (2, 10, 100)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert M.longest_sequence(models[0]) == 64


def test_flops_count_multiplying_weights_and_attention():
    s = M.PRESETS["llama-134m"]
    matmul = s.vocab * s.width + s.layers * (4 * s.width**2 + 3 * s.width * s.ffn)
    norms = s.width * (2 * s.layers + 1)
    assert M.flops_of(M.meta_model("llama-134m"), 2048) == 6 * (matmul + norms) + 12 * s.layers * s.width * 2048
    assert M.flops_of(M.meta_model("tiny"), 128) == 6 * M.parameter_count("tiny") + 12 * 2 * 128 * 128  # tied: the table multiplies too


@pytest.mark.parametrize(
    "spec,says",
    [
        ("llama-134", "did you mean 'llama-134m'"),
        ({"model_type": "gpt9"}, "'gpt9'"),
        ({"hidden_size": 3}, "model_type"),
        ({**GPT2, "n_layers": 3}, "did you mean 'n_layer'"),
        ({**GPT2, "n_head": 3}, "cannot be built"),
        ({"model_type": "vit"}, "cannot be built"),
    ],
)
def test_refuses(spec, says):
    with pytest.raises(BadInput, match=says):
        M.build(spec, 100, seed=0)
