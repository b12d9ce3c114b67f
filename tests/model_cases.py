"""Random small models and batches for the property tests, and the comparison of a batch with the oracle.

A batch is rows of documents: `rows[b][g]` is the length of document g of row b. Every document is compared with the
oracle's run of that document alone, so packing and padding are under test in every case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from oracle import DocumentResult, Spec, core_windows, document_forward, softmax

VOCABULARY = 13
PADDING_ID = 12
# Routing runs in float32 inside a float64 model: what depends on alpha agrees with the oracle to float32's precision,
# and a choice between blocks closer than this may fall either way.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
NEAR_TIE = 1e-5


def bounded(examples: int) -> settings:
    """Seeded, and without a clock: the same cases on every machine."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


@st.composite
def specs(draw: st.DrawFn, **given) -> Spec:
    """Any small model; `given` fixes fields."""
    heads = draw(st.integers(1, 2))
    window = draw(st.integers(1, 6))
    drawn = {
        "num_attention_heads": heads,
        "hidden_size": heads * draw(st.sampled_from([2, 4])),
        "num_prelude_layers": draw(st.integers(0, 2)),
        "num_coda_layers": draw(st.integers(0, 1)),
        "num_experts": draw(st.integers(1, 4)),
        "num_routed_depths": draw(st.integers(1, 4)),
        "window_size": window,
        "window_stride": draw(st.sampled_from([0, window // 2]) | st.integers(0, window)),
        "core_attention": draw(st.sampled_from(["windowed", "windowed", "windowed", "full", "sliding"])),
        "tie_router": draw(st.booleans()),
        "router_noise_max": draw(st.sampled_from([10.0, 0.5])),
        "balance_scope": draw(st.sampled_from(["global", "depth"])),
        "depth_film": draw(st.booleans()),
        "input_injection": draw(st.sampled_from(["none", "diagonal"])),
        "rope_theta": draw(st.sampled_from([10_000.0, 20.0])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
    }
    return Spec(**(drawn | given))


def routed_specs() -> st.SearchStrategy[Spec]:
    """Models with a choice to make, in several windows: the paper's core with two blocks or more."""
    return specs(core_attention="windowed").filter(lambda spec: spec.num_experts > 1)


def row_lengths(max_rows: int = 3) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(1, 11), min_size=1, max_size=3), min_size=1, max_size=max_rows)


def make_model(spec: Spec, seed: int, router_only_tokens: bool = False) -> LoLForCausalLM:
    """A float64 model in eval mode, every parameter random, the router's so large that windows choose apart."""
    fields = asdict(spec) | {"fixed_path": None if spec.fixed_path is None else list(spec.fixed_path)}
    config = LoLConfig(**fields, vocab_size=VOCABULARY, intermediate_size=5, router_only_tokens=router_only_tokens)
    model = LoLForCausalLM(config).double().eval()
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor, scale: float) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * scale

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind = name.removesuffix(".weight").split(".")[-1]
            if kind in ("attn_norm", "mlp_norm", "norm", "input_scale"):
                parameter.copy_(1 + draw(parameter, 0.2))
            elif name == "model.router.weight":
                parameter.copy_(draw(parameter, 3.0))
            elif kind in ("embed_tokens", "depth_embedding", "filler_embedding", "delta"):
                parameter.copy_(draw(parameter, 1.0))
            else:
                parameter.copy_(draw(parameter, 0.4))
        if model.model.expert_bias is not None:
            model.model.expert_bias.copy_(draw(model.model.expert_bias, 0.2))
    return model


@dataclass(frozen=True)
class Batch:
    """Documents laid out in rows, with padding at random sides."""

    documents: list[list[list[int]]]
    starts: list[list[int]]  # the column of each document's first token
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor

    def inputs(self) -> dict[str, Tensor]:
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }

    def place(self, values: Sequence[Sequence[Sequence[int]]], fill: int) -> Tensor:
        """Lay one number per token out like the tokens."""
        grid = torch.full_like(self.input_ids, fill)
        for row, (per_document, starts) in enumerate(zip(values, self.starts, strict=True)):
            for numbers, start in zip(per_document, starts, strict=True):
                grid[row, start : start + len(numbers)] = torch.tensor(numbers)
        return grid

    def each(self) -> list[tuple[int, int, list[int], int]]:
        """(row, number in the row, tokens, first column) of every document, row after row."""
        return [
            (row, number, tokens, self.starts[row][number])
            for row, documents in enumerate(self.documents)
            for number, tokens in enumerate(documents)
        ]


def make_batch(rows: list[list[int]], seed: int, extra_columns: int = 2) -> Batch:
    """Random tokens; each row padded left, right or on both sides up to the longest row and `extra_columns` more."""
    generator = torch.Generator().manual_seed(seed)
    columns = max(map(sum, rows)) + extra_columns
    shape = (len(rows), columns)
    ids, mask = torch.full(shape, PADDING_ID), torch.zeros(shape, dtype=torch.long)
    # Positions under padding are the caller's noise and must not matter.
    positions = torch.randint(0, 3, shape, generator=generator)
    documents, starts = [], []
    for row, lengths in enumerate(rows):
        column = int(torch.randint(0, columns - sum(lengths) + 1, (), generator=generator))
        documents.append([])
        starts.append([])
        for length in lengths:
            tokens = torch.randint(0, VOCABULARY, (length,), generator=generator)
            place = slice(column, column + length)
            ids[row, place], mask[row, place], positions[row, place] = tokens, 1, torch.arange(length)
            documents[-1].append(tokens.tolist())
            starts[-1].append(column)
            column += length
    return Batch(documents, starts, ids, mask, positions)


def window_counts(spec: Spec, batch: Batch, depth_index: int) -> list[list[int]]:
    """The number of windows of every document of every row at a depth."""
    return [[len(core_windows(spec, len(tokens), depth_index)) for tokens in row] for row in batch.documents]


def assume_decided(spec: Spec, weights: dict[str, Tensor], result: DocumentResult, path=None) -> None:
    """Drop a case in which some free choice is too close for float32 to tell."""
    if spec.num_experts == 1 or spec.routing == "fixed":
        return
    bias = weights["model.expert_bias"].double()
    for depth_index, logits in enumerate(result.router_logits):
        row = bias if spec.balance_scope == "global" else bias[depth_index]
        for k, z in enumerate(logits):
            if path is None or path[depth_index][k] == -1:
                best, second = (torch.tensor(softmax(z), dtype=torch.float64) + row).topk(2).values
                assume(best - second > NEAR_TIE)


def check_against_oracle(
    spec: Spec,
    model: LoLForCausalLM,
    batch: Batch,
    *,
    num_depths: int | None = None,
    path: list[list[list[int]]] | None = None,
    path_weight: float | None = None,
    noise_seed: int | None = None,
    router_only: list[list[list[int]]] | None = None,
    given_path: Tensor | None = None,
    **inputs,
) -> list[DocumentResult]:
    """Run the batch, hold every document of it to the oracle, and return the oracle's results.

    `path[b][l][k]` numbers windows per row as the model does; `router_only[b][g][t]`. `given_path` and `inputs` are
    what the model is given instead, where a test gives it in another form.
    """
    given = batch.inputs()
    if num_depths is not None:
        given["num_depths"] = num_depths
    if path is not None:
        given |= {"path": torch.tensor(path) if given_path is None else given_path, "path_weight": path_weight}
    if noise_seed is not None:
        model.train()
        given["generator"] = torch.Generator().manual_seed(noise_seed)
    if router_only is not None:
        given["router_only_ids"] = batch.place(router_only, -1)
    output = model(**(given | inputs), output_router_logits=True)
    model.eval()

    depths = spec.num_routed_depths if num_depths is None else num_depths
    noise = None if noise_seed is None else drawn_noise(spec, batch, depths, noise_seed)
    weights, results = model.state_dict(), []
    first_window = [[0] * depths for _ in batch.documents]
    for number, (row, place, tokens, column) in enumerate(batch.each()):
        counts = [len(core_windows(spec, len(tokens), depth)) for depth in range(depths)]
        spans = [slice(first, first + count) for first, count in zip(first_window[row], counts, strict=True)]
        own_path = None if path is None else [path[row][depth][spans[depth]] for depth in range(depths)]
        result = document_forward(
            spec,
            weights,
            tokens,
            depth=depths,
            path=own_path,
            path_weight=path_weight,
            noise=None if noise is None else noise[number],
            router_only=None if router_only is None else router_only[row][place],
        )
        assume_decided(spec, weights, result, own_path)
        compare(output, result, row, spans, slice(column, column + len(tokens)))
        first_window[row] = [first + count for first, count in zip(first_window[row], counts, strict=True)]
        results.append(result)
    assert output.routing.load.tolist() == sum(result.load[:depths] for result in results).tolist()
    for row, used in enumerate(first_window):
        for depth in range(depths):
            assert (output.routing.experts[row, depth, used[depth] :] == -1).all()
    return results


def compare(output, result: DocumentResult, row: int, spans: list[slice], columns: slice) -> None:
    """Hold one document's part of the model's output to the oracle's."""
    for depth, span in enumerate(spans):
        assert output.routing.experts[row, depth, span].tolist() == result.experts[depth]
        own_weights = output.routing.weights[row, depth, span].double()
        assert_close(own_weights, torch.tensor(result.weights[depth], dtype=torch.float64), **CLOSE)
        if result.router_logits[depth]:
            assert_close(
                output.router_logits[depth][row, span].double(), torch.stack(result.router_logits[depth]), **CLOSE
            )
    assert_close(output.logits[row, columns], result.logits, **CLOSE)


def drawn_noise(spec: Spec, batch: Batch, depths: int, seed: int) -> list[list[list[Tensor]]]:
    """[document][depth][window]: the model draws per depth one (windows, L), in the order of rows and documents."""
    generator = torch.Generator().manual_seed(seed)
    per_document: list[list[list[Tensor]]] = [[] for _ in batch.each()]
    for depth_index in range(depths):
        counts = [count for row in window_counts(spec, batch, depth_index) for count in row]
        drawn = torch.randn(sum(counts), spec.num_experts, generator=generator)
        for own, part in zip(per_document, drawn.split(counts), strict=True):
            own.append(list(part.double()))
    return per_document


# Which tensor of transformers' layers each part of a block is.
LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
