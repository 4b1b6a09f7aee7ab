# SPDX-License-Identifier: Apache-2.0
"""The references that the fused kernels are measured by, against other computations of the same mathematics.

KDA: the recurrence of `vllm_ling.reference.kda` (states the other way round) over whole histories, without slots.
MLA: rotation as multiplication of complex numbers.
"""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from vllm_ling.decode.kda_step import KdaBatch, KdaShape, KdaStates, KdaWeights
from vllm_ling.decode.mla_prepare import MlaShape, MlaWeights
from vllm_ling.decode.reference import kda_step_reference, mla_prepare_reference
from vllm_ling.reference.kda import kda_gate, kda_recurrent, l2_normalize

SHAPE = KdaShape(heads=2, hidden=64)
WIDE, SLOTS = SHAPE.heads * 128, 10
PAST = 5  # tokens before the step under test


def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float32) * scale


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Sequence:
    """Projections of one sequence's tokens, all of them, and what KDA makes of them."""

    projected: torch.Tensor
    normed: torch.Tensor

    @classmethod
    def random(cls, tokens: int) -> "Sequence":
        return cls(normal(tokens, 5 * WIDE).bfloat16(), normal(tokens, SHAPE.hidden).bfloat16())

    def run(self, w: KdaWeights) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Outputs [tokens, heads * 128], and the state [heads, key, value] after each token."""
        tokens = len(self.projected)
        q, k, v, f, gate = self.projected.float().split(WIDE, -1)

        def mixed(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
            padded = F.pad(x.T[None], (3, 0))
            return F.silu(F.conv1d(padded, taps[:, None], groups=WIDE))[0].T.view(1, tokens, -1, 128)

        q, k, v = mixed(q, w.q_conv), mixed(k, w.k_conv), mixed(v, w.v_conv)
        g = kda_gate(f[None], w.a_log, w.dt_bias, w.lower_bound)
        beta = torch.sigmoid(self.normed.float() @ w.b.float().T)[None]
        state, states, outputs = torch.zeros(1, SHAPE.heads, 128, 128), [], []
        for t in range(tokens):
            now = slice(t, t + 1)
            o, state = kda_recurrent(
                l2_normalize(q[:, now]) / 128**0.5,
                *(l2_normalize(k[:, now]), v[:, now], g[:, now], beta[:, now], state),
            )
            outputs.append(o[0, 0])
            states.append(state[0])
        o = torch.stack(outputs)
        o = F.rms_norm(o, (128,), w.o_norm.float(), w.eps) * gate.sigmoid().view_as(o)
        return o.flatten(1), states


@pytest.fixture
def w() -> KdaWeights:
    torch.manual_seed(0)
    return KdaWeights(
        b=normal(SHAPE.heads, SHAPE.hidden, scale=0.2).bfloat16(),
        q_conv=normal(WIDE, 4, scale=0.5),
        k_conv=normal(WIDE, 4, scale=0.5),
        v_conv=normal(WIDE, 4, scale=0.5),
        a_log=normal(SHAPE.heads, scale=0.5),
        dt_bias=normal(WIDE) - 3,
        o_norm=(1 + normal(128, scale=0.1)).bfloat16(),
        eps=1e-6,
        lower_bound=-5.0,
    )


def pool() -> KdaStates:
    """Slots full of what must not be read."""
    conv = torch.full((SLOTS, 3 * WIDE, 6), 50.0, dtype=torch.bfloat16)
    return KdaStates(conv, torch.full((SLOTS, SHAPE.heads, 128, 128), 50.0, dtype=torch.float32))


def close(ours: torch.Tensor, exact: torch.Tensor) -> bool:
    return torch.allclose(ours, exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


def test_plain_decodes_advance_their_slots_and_padding_none(w: KdaWeights) -> None:
    sequences, states = [Sequence.random(PAST) for _ in range(2)], pool()
    states.conv[[4, 7]], states.recurrent[[4, 7]] = 0, 0
    batch = KdaBatch(integers(7, 0, 4))  # sequence 0 in slot 7, a padded one, sequence 1 in slot 4
    exact = [one.run(w) for one in sequences]
    for t in range(PAST):
        rows = (0, 0, 1)
        projected = torch.stack([sequences[row].projected[t] for row in rows])
        normed = torch.stack([sequences[row].normed[t] for row in rows])
        out = kda_step_reference(SHAPE, projected, normed, w, states, batch)
        assert close(out[0], exact[0][0][t]) and close(out[2], exact[1][0][t])
        assert not out[1].any()
    for slot, (_, after) in ((7, exact[0]), (4, exact[1])):
        assert close(states.recurrent[slot].mT, after[-1]), "the pool holds value channels first"
    assert torch.equal(states.conv[7, :, :3], sequences[0].projected[-3:, : 3 * WIDE].T)
    others = [slot for slot in range(SLOTS) if slot not in (4, 7)]
    assert states.recurrent[others].eq(50).all() and states.conv[others].eq(50).all()


def test_verification_starts_from_the_last_accepted_token(w: KdaWeights) -> None:
    """Two sequences: three tokens of which two are kept, then four, on other slots; a padded one behind them."""
    sequences, states = [Sequence.random(PAST + 4) for _ in range(2)], pool()
    slots = torch.stack([integers(1, 2, 3, 4), integers(8, 7, 6, 5), integers(0, 0, 0, 0)])
    exact = [one.run(w) for one in sequences]
    kept = (2, 3)  # tokens accepted in the step before, which wrote one state per slot
    for row, one in enumerate(sequences):
        past = PAST - kept[row]
        for n in range(4):  # what the step before left: a state after each of its tokens, accepted or not
            states.recurrent[slots[row, n]] = exact[row][1][past + n].mT if n < kept[row] else 77.0
        history = one.projected[:PAST, : 3 * WIDE].T
        at = kept[row] - 1
        states.conv[slots[row, 0], :, at : at + 3] = history[:, PAST - 3 : PAST]
    counts = (2, 4)
    batch = KdaBatch(slots, integers(0, 2, 6, 6), integers(*kept, 1), 4)
    parts = [
        (one.projected[PAST : PAST + n], one.normed[PAST : PAST + n])
        for one, n in zip(sequences, counts, strict=True)
    ]
    projected, normed = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    before = replace(states, conv=states.conv.clone(), recurrent=states.recurrent.clone())
    out = kda_step_reference(SHAPE, projected, normed, w, states, batch)
    assert close(out[:2], exact[0][0][PAST : PAST + 2]) and close(out[2:], exact[1][0][PAST : PAST + 4])
    for row, n in enumerate(counts):
        for token in range(n):
            assert close(states.recurrent[slots[row, token]].mT, exact[row][1][PAST + token])
        window = sequences[row].projected[PAST - 2 : PAST + n, : 3 * WIDE].T
        assert torch.equal(states.conv[slots[row, 0], :, : n + 2], window)
    for untouched in (0, 3, 4, 9):
        assert torch.equal(states.recurrent[untouched], before.recurrent[untouched])


def test_the_references_depend_on_every_weight(w: KdaWeights) -> None:
    one = Sequence.random(2)
    exact, _ = one.run(w)
    for change in (
        {"q_conv": w.k_conv},
        {"v_conv": w.q_conv},
        {"b": -w.b},
        {"a_log": w.a_log + 1},
        {"dt_bias": w.dt_bias + 1},
        {"o_norm": w.o_norm.flip(0)},
        {"lower_bound": -2.0},
    ):
        states = pool()
        states.conv[1], states.recurrent[1] = 0, 0
        changed = replace(w, **change)  # type: ignore[arg-type]
        for t in range(2):
            now = slice(t, t + 1)
            out = kda_step_reference(
                SHAPE, one.projected[now], one.normed[now], changed, states, KdaBatch(integers(1))
            )
        assert not close(out[0], exact[1]), change


def test_mla_inputs_are_rotated_pairs_a_normed_latent_and_a_gate() -> None:
    torch.manual_seed(1)
    shape = MlaShape(heads=4, hidden=256, nope=128, rope=64, latent=128)
    angles = normal(20, 32)
    w = MlaWeights(
        latent_norm=(1 + normal(shape.latent, scale=0.1)).bfloat16(),
        gate=normal(shape.heads, shape.hidden, scale=0.05).bfloat16(),
        cos_sin=torch.cat([angles.cos(), angles.sin()], -1).bfloat16(),
        eps=1e-6,
    )
    projected, normed = normal(3, sum(shape.projected)).bfloat16(), normal(3, shape.hidden).bfloat16()
    positions = torch.tensor([3, 0, 17])
    found = mla_prepare_reference(shape, projected, normed, positions, w)

    turn = torch.complex(w.cos_sin[positions, :32].float(), w.cos_sin[positions, 32:].float())
    rows = projected.float()
    for token in range(3):
        for head in range(4):
            query = rows[token, head * 192 : (head + 1) * 192]
            pairs = torch.view_as_complex(query[128:].view(32, 2)) * turn[token]
            assert torch.equal(found.query[token, head, :128], query[:128])
            assert torch.allclose(found.query[token, head, 128:], torch.view_as_real(pairs).flatten())
        pairs = torch.view_as_complex(rows[token, -64:].reshape(32, 2)) * turn[token]
        assert found.key.shape == (3, 1, 64)
        assert torch.allclose(found.key[token, 0], torch.view_as_real(pairs).flatten())
    latent = F.rms_norm(rows[:, 768:896], (128,), w.latent_norm.float(), w.eps)
    assert torch.allclose(found.latent, latent, atol=1e-6)
    gate = torch.stack([(row * w.gate.float()).sum(-1) for row in normed.float()]).sigmoid()
    assert found.gate.shape == (3, 4) and torch.allclose(found.gate, gate, atol=1e-6)
