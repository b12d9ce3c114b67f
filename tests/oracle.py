"""The mechanism as slow loops: what a Library-of-Layers model computes for ONE document, in float64.

Written from the specification's text alone and importing nothing from `lol`, so that the package can be held to it.
Tensors are used as arrays of numbers; every loop the text implies (tokens, windows, depths, heads, keys) is written
out. Read it beside the text: windows (section 2), router (3), balancing (4), growing, injection and FiLM (5), fixed
paths (6).

Weights come as a state dict with the checkpoint's names. Linear weights are (out, in). Letters: n tokens, d width,
L blocks, D routed depths, W window, S stride; l a depth (here from 0), k a window, m a block, i and j positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_PARTS = (
    "attn_norm",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "mlp_norm",
    "gate_proj",
    "up_proj",
    "down_proj",
)


@dataclass(frozen=True)
class Spec:
    """The numbers of one model; the names are those of the model's configuration."""

    hidden_size: int
    num_attention_heads: int
    num_prelude_layers: int
    num_coda_layers: int
    num_experts: int
    num_routed_depths: int
    window_size: int
    window_stride: int
    routing: str = "learned"  # or "fixed"
    fixed_path: tuple[int, ...] | None = None
    core_attention: str = "windowed"  # or "full", "sliding"
    tie_router: bool = True
    router_noise_max: float = 10.0
    balance_scope: str = "global"  # or "depth"
    depth_film: bool = False
    input_injection: str = "none"  # or "diagonal"
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class DocumentResult:
    """What one document's forward gives. The lists over depths hold the executed depths only; `load` has all D rows."""

    logits: Tensor  # (n, V)
    experts: list[list[int]]  # [depth][window] the block that ran
    weights: list[list[float]]  # [depth][window] alpha, what the block's change was multiplied by
    router_logits: list[list[Tensor]]  # [depth][window] (L,), noise included; empty lists where there is no router
    load: Tensor  # (D, L) windows that chose each block
    hidden: Tensor  # (n, d) after the final norm: what the head reads


# --- 2. Windows -----------------------------------------------------------------------------------------------------


def shift_of_depth(depth_index: int, window_size: int, window_stride: int) -> int:
    """delta_l = ((l-1)·S) mod W; `depth_index` is l-1."""
    return (depth_index * window_stride) % window_size


def windows_of(num_tokens: int, window_size: int, shift: int) -> list[list[int]]:
    """The positions of each window, in order: position i is in window floor((i + delta) / W)."""
    windows: list[list[int]] = []
    for i in range(num_tokens):
        k = (i + shift) // window_size
        while len(windows) <= k:
            windows.append([])
        windows[k].append(i)
    return windows


def core_windows(spec: Spec, num_tokens: int, depth_index: int) -> list[list[int]]:
    """The windows of one depth; with full or sliding core attention the whole document is one."""
    if spec.core_attention == "windowed":
        shift = shift_of_depth(depth_index, spec.window_size, spec.window_stride)
        return windows_of(num_tokens, spec.window_size, shift)
    return [list(range(num_tokens))]


# --- 1. A block -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Film:
    """One depth's gamma and beta (d,) for the two norms of a routed block."""

    attn_scale: Tensor
    attn_shift: Tensor
    mlp_scale: Tensor
    mlp_shift: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (d,) divided by the root of its mean square, times the weight."""
    mean_square = sum(float(value) ** 2 for value in x) / len(x)
    return x / math.sqrt(mean_square + eps) * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE on one head's vector: channel c and channel c + half are a plane turned by position·theta^(-2c/head_dim)."""
    head_dim = len(x)
    half = head_dim // 2
    turned = torch.empty_like(x)
    for c in range(half):
        angle = position * theta ** (-2 * c / head_dim)
        turned[c] = x[c] * math.cos(angle) - x[c + half] * math.sin(angle)
        turned[c + half] = x[c + half] * math.cos(angle) + x[c] * math.sin(angle)
    return turned


def visible_keys(query: int, tokens: Sequence[int], sliding_window: int | None) -> list[int]:
    """The positions a query attends to: its own and earlier ones among `tokens`, the last W of them if sliding."""
    keys = [j for j in tokens if j <= query]
    if sliding_window is not None:
        keys = [j for j in keys if j >= query - sliding_window + 1]
    return keys


def attend(
    spec: Spec, block: Mapping[str, Tensor], normed: Mapping[int, Tensor], sliding_window: int | None
) -> dict[int, Tensor]:
    """Causal attention among the positions that are keys of `normed`; each value is a token's normed state (d,)."""
    head_dim = spec.hidden_size // spec.num_attention_heads
    queries = {i: block["q_proj"] @ x for i, x in normed.items()}
    keys = {i: block["k_proj"] @ x for i, x in normed.items()}
    values = {i: block["v_proj"] @ x for i, x in normed.items()}
    heads: dict[int, list[Tensor]] = {i: [] for i in normed}
    for h in range(spec.num_attention_heads):
        channels = slice(h * head_dim, (h + 1) * head_dim)
        turned_queries = {i: rotate(q[channels], i, spec.rope_theta) for i, q in queries.items()}
        turned_keys = {i: rotate(k[channels], i, spec.rope_theta) for i, k in keys.items()}
        for i in normed:
            seen = visible_keys(i, list(normed), sliding_window)
            scores = [float(turned_queries[i] @ turned_keys[j]) / math.sqrt(head_dim) for j in seen]
            exponentials = [math.exp(score - max(scores)) for score in scores]
            mixed = torch.zeros(head_dim, dtype=torch.float64)
            for j, exponential in zip(seen, exponentials, strict=True):
                mixed = mixed + exponential / sum(exponentials) * values[j][channels]
            heads[i].append(mixed)
    return {i: block["o_proj"] @ torch.cat(heads[i]) for i in normed}


def swiglu(block: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """down(silu(gate(x)) · up(x))."""
    gate = block["gate_proj"] @ x
    return block["down_proj"] @ (gate * torch.sigmoid(gate) * (block["up_proj"] @ x))


def run_block(
    spec: Spec,
    block: Mapping[str, Tensor],
    states: Mapping[int, Tensor],
    film: Film | None = None,
    sliding_window: int | None = None,
) -> dict[int, Tensor]:
    """A block on some positions' states: x + Attn(norm(x)), then x + SwiGLU(norm(x)).

    FiLM, where given, changes what each norm hands on: norm(x)·(1 + gamma) + beta.
    """
    normed = {}
    for i, x in states.items():
        normed[i] = rms_norm(x, block["attn_norm"], spec.rms_norm_eps)
        if film is not None:
            normed[i] = normed[i] * (1 + film.attn_scale) + film.attn_shift
    attended = attend(spec, block, normed, sliding_window)
    outputs = {}
    for i, x in states.items():
        x = x + attended[i]
        fed = rms_norm(x, block["mlp_norm"], spec.rms_norm_eps)
        if film is not None:
            fed = fed * (1 + film.mlp_scale) + film.mlp_shift
        outputs[i] = x + swiglu(block, fed)
    return outputs


# --- 3. Router ------------------------------------------------------------------------------------------------------


def mean_of(vectors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(vectors[0])
    for vector in vectors:
        total = total + vector
    return total / len(vectors)


def router_input(states: Sequence[Tensor], windows: Sequence[Sequence[int]], k: int, depth_vector: Tensor) -> Tensor:
    """What the router reads for window k: the mean of the earlier windows' means, each counting once.

    The first window has none before it: half of the depth's vector plus the state of its first token.
    """
    if k == 0:
        return 0.5 * (depth_vector + states[windows[0][0]])
    window_means = [mean_of([states[i] for i in windows[earlier]]) for earlier in range(k)]
    return mean_of(window_means)


def noisy_logits(router: Mapping[str, Tensor], r: Tensor, noise: Tensor | None, noise_max: float) -> Tensor:
    """z = W_r r + b_r; in training each z_m moves by eps_m · min(softplus(W_n z + b_n)_m, noise_max)."""
    z = router["weight"] @ r + router["bias"]
    if noise is None:
        return z
    spread = router["noise_weight"] @ z + router["noise_bias"]
    moved = z.clone()
    for m in range(len(z)):
        softplus = math.log1p(math.exp(-abs(float(spread[m])))) + max(float(spread[m]), 0.0)
        moved[m] = z[m] + float(noise[m]) * min(softplus, noise_max)
    return moved


def softmax(z: Tensor) -> list[float]:
    largest = max(float(value) for value in z)
    exponentials = [math.exp(float(value) - largest) for value in z]
    return [exponential / sum(exponentials) for exponential in exponentials]


def choose(probabilities: Sequence[float], bias: Sequence[float]) -> int:
    """argmax of a_m + bias_m; the lowest index wins a tie."""
    best = 0
    for m in range(len(probabilities)):
        if probabilities[m] + bias[m] > probabilities[best] + bias[best]:
            best = m
    return best


# --- The weights of a checkpoint ------------------------------------------------------------------------------------


def layer_weights(weights: Mapping[str, Tensor], stack: str, index: int) -> dict[str, Tensor]:
    """The nine tensors of prelude or coda layer `index`."""
    return {part: weights[f"model.{stack}.{index}.{part}.weight"] for part in BLOCK_PARTS}


def library_block(weights: Mapping[str, Tensor], m: int) -> dict[str, Tensor]:
    """The nine tensors of block m, out of the library's stacked ones."""
    return {part: weights[f"model.library.{part}.weight"][m] for part in BLOCK_PARTS}


def router_of_depth(spec: Spec, weights: Mapping[str, Tensor], depth_index: int) -> dict[str, Tensor]:
    parts = {part: weights[f"model.router.{part}"] for part in ("weight", "bias", "noise_weight", "noise_bias")}
    if spec.tie_router:
        return parts
    return {part: stacked[depth_index] for part, stacked in parts.items()}


def bias_of_depth(spec: Spec, weights: Mapping[str, Tensor], depth_index: int) -> list[float]:
    bias = weights["model.expert_bias"]
    return (bias if spec.balance_scope == "global" else bias[depth_index]).tolist()


def film_of_depth(spec: Spec, weights: Mapping[str, Tensor], depth_index: int) -> Film | None:
    if not spec.depth_film:
        return None
    parts = ("attn_scale", "attn_shift", "mlp_scale", "mlp_shift")
    return Film(**{part: weights[f"model.film.{part}"][depth_index] for part in parts})


# --- 5. Diagonal input injection ------------------------------------------------------------------------------------


def inject(weights: Mapping[str, Tensor], state: Tensor, prelude_output: Tensor) -> Tensor:
    """s becomes exp(-Delta·A)·s + Delta·B·p, per channel, with Delta = softplus(delta) and A = exp(log_decay)."""
    delta = torch.log1p(torch.exp(weights["model.injection.delta"]))
    decay = torch.exp(weights["model.injection.log_decay"])
    return torch.exp(-delta * decay) * state + delta * weights["model.injection.input_scale"] * prelude_output


# --- The whole document ---------------------------------------------------------------------------------------------


def route_window(
    spec: Spec,
    weights: Mapping[str, Tensor],
    depth_index: int,
    r: Tensor,
    noise: Tensor | None,
    forced: int,
    path_weight: float | None,
) -> tuple[Tensor, int, float]:
    """(logits, block, alpha) of one window. `forced` is a block or -1; alpha never holds the balancing bias."""
    router = router_of_depth(spec, weights, depth_index)
    z = noisy_logits(router, r, noise, spec.router_noise_max)
    a = softmax(z)
    if forced == -1:
        block = choose(a, bias_of_depth(spec, weights, depth_index))
        return z, block, a[block]
    return z, forced, a[forced] if path_weight is None else path_weight


def embed(
    weights: Mapping[str, Tensor], tokens: Sequence[int], router_only: Sequence[int] | None
) -> tuple[list[Tensor], Tensor]:
    """The states that enter the prelude, and the sum of the router-only tokens' embeddings (0 without any).

    A router-only token's place holds the filler embedding.
    """
    table = weights["model.embed_tokens.weight"]
    states = [table[token] for token in tokens]
    for_router = torch.zeros(table.shape[1], dtype=torch.float64)
    for i, token in enumerate(router_only or []):
        if token >= 0:
            states[i] = weights["model.filler_embedding"]
            for_router = for_router + table[token]
    return states, for_router


def run_layers(
    spec: Spec, weights: Mapping[str, Tensor], stack: str, count: int, states: Sequence[Tensor]
) -> list[Tensor]:
    """Prelude or coda: full causal attention over the document."""
    states = list(states)
    for index in range(count):
        outputs = run_block(spec, layer_weights(weights, stack, index), dict(enumerate(states)))
        states = [outputs[i] for i in range(len(states))]
    return states


def run_window(
    spec: Spec,
    weights: Mapping[str, Tensor],
    depth_index: int,
    block: int,
    alpha: float,
    states: Mapping[int, Tensor],
) -> dict[int, Tensor]:
    """s + alpha·(E_block(s) - s) on the window's tokens, attention confined to them."""
    sliding_window = spec.window_size if spec.core_attention == "sliding" else None
    film = film_of_depth(spec, weights, depth_index)
    outputs = run_block(spec, library_block(weights, block), states, film, sliding_window)
    return {i: s + alpha * (outputs[i] - s) for i, s in states.items()}


def document_forward(
    spec: Spec,
    weights: Mapping[str, Tensor],
    tokens: Sequence[int],
    *,
    depth: int | None = None,
    path: Sequence[Sequence[int]] | None = None,
    path_weight: float | None = None,
    noise: Sequence[Sequence[Tensor]] | None = None,
    router_only: Sequence[int] | None = None,
) -> DocumentResult:
    """One document alone, through prelude, routed depths, coda and head.

    `depth` runs the first so many routed depths (growing). `path[l][k]` forces a block, -1 leaves the choice; a forced
    window's alpha is the router's probability of that block (1 in a fixed model), or `path_weight`. `noise[l][k]` (L,)
    is the standard normal draw of a training forward. `router_only[t]` is the id of a token that only the router
    reads, or -1.
    """
    weights = {name: tensor.detach().to(torch.float64) for name, tensor in weights.items()}
    depth = spec.num_routed_depths if depth is None else depth
    experts: list[list[int]] = [[] for _ in range(depth)]
    alphas: list[list[float]] = [[] for _ in range(depth)]
    router_logits: list[list[Tensor]] = [[] for _ in range(depth)]
    load = torch.zeros(spec.num_routed_depths, spec.num_experts, dtype=torch.long)

    states, for_router = embed(weights, tokens, router_only)
    states = run_layers(spec, weights, "prelude", spec.num_prelude_layers, states)
    prelude_output = states

    for depth_index in range(depth):
        if spec.input_injection == "diagonal":
            states = [inject(weights, s, p) for s, p in zip(states, prelude_output, strict=True)]
        windows = core_windows(spec, len(tokens), depth_index)
        after = list(states)
        for k, window in enumerate(windows):
            forced = -1 if path is None else path[depth_index][k]
            if spec.routing == "fixed":
                assert spec.fixed_path is not None, "a fixed model needs its path"
                block = spec.fixed_path[depth_index] if forced == -1 else forced
                alpha = 1.0 if forced == -1 or path_weight is None else path_weight
            else:
                r = router_input(states, windows, k, weights["model.depth_embedding"][depth_index]) + for_router
                eps = None if noise is None else noise[depth_index][k]
                z, block, alpha = route_window(spec, weights, depth_index, r, eps, forced, path_weight)
                router_logits[depth_index].append(z)
            moved = run_window(spec, weights, depth_index, block, alpha, {i: states[i] for i in window})
            for i in window:
                after[i] = moved[i]
            experts[depth_index].append(block)
            alphas[depth_index].append(alpha)
            load[depth_index, block] += 1
        states = after

    states = run_layers(spec, weights, "coda", spec.num_coda_layers, states)
    hidden = [rms_norm(s, weights["model.norm.weight"], spec.rms_norm_eps) for s in states]
    head = weights["model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"]
    logits = torch.stack([head @ h for h in hidden])
    return DocumentResult(logits, experts, alphas, router_logits, load, torch.stack(hidden))


# --- Losses, 4. Balancing, 5. Growing -------------------------------------------------------------------------------


def next_token_losses(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """-log probability (nats) of tokens[t+1] under logits[t]; n-1 values for n tokens."""
    losses = []
    for t in range(len(tokens) - 1):
        losses.append(-math.log(softmax(logits[t])[tokens[t + 1]]))
    return losses


def sequence_auxiliary_loss(result: DocumentResult, num_experts: int) -> float:
    """L · sum over m of f_m · abar_m over the windows of all depths of one document; without the coefficient.

    f_m is the share of windows that chose m, abar_m the mean probability of m.
    """
    chosen = [block for per_depth in result.experts for block in per_depth]
    probabilities = [softmax(z) for per_depth in result.router_logits for z in per_depth]
    total = 0.0
    for m in range(num_experts):
        share = sum(1 for block in chosen if block == m) / len(chosen)
        mean_probability = sum(a[m] for a in probabilities) / len(probabilities)
        total += share * mean_probability
    return num_experts * total


def updated_bias(bias: Tensor, load: Tensor, rate: float, scope: str, limit: float = 16.0) -> Tensor:
    """bias_m + rate · sign(mean load - load_m), kept within ±limit, from the loads (D, L) of one optimizer step.

    "global": the loads of all depths are summed, bias is (L,). "depth": each depth has its own, bias is (D, L).
    """
    if scope == "depth":
        rows = [updated_bias(bias[row], load[row : row + 1], rate, "global", limit) for row in range(len(load))]
        return torch.stack(rows)
    num_experts = load.shape[1]
    counts = [sum(int(load[row, m]) for row in range(len(load))) for m in range(num_experts)]
    moved = bias.detach().to(torch.float64).clone()
    for m in range(num_experts):
        # Compared as integers: a mean that is no float must not decide a sign.
        below, above = counts[m] * num_experts < sum(counts), counts[m] * num_experts > sum(counts)
        step = rate if below else -rate if above else 0.0
        moved[m] = min(max(float(moved[m]) + step, -limit), limit)
    return moved


def growing_depth(step: int, initial: int, final: int, period: int) -> int:
    """ceil(D0 + (D - D0)(1 - sqrt(1 - t/T))) before step T, and D from T on.

    The same as D - floor((D - D0)·sqrt((T - t)/T)), which integers give without a rounding error at whole numbers.
    """
    if step >= period:
        return final
    return final - math.isqrt((final - initial) ** 2 * (period - step) // period)
