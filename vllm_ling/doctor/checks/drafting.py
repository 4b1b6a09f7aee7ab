# SPDX-License-Identifier: Apache-2.0
"""Whether drafting does what it costs: accept length, positions, break-even, load, sleep."""

from vllm_ling.doctor import costs
from vllm_ling.doctor.facts.store import Facts, MissingFact
from vllm_ling.doctor.finding import Verdict, fail, ok, unknown, warn
from vllm_ling.doctor.registry import check

# A draft that knows nothing is accepted about once in a vocabulary; a trained MTP layer reaches 2 and more.
CHANCE = 1.05
POOR = 1.3
DEAD = 0.02
ENOUGH_DRAFTS = 20
# Published for GSM8K on Ling-3.0-flash with three drafts; used where nothing was measured yet.
PUBLISHED_LENGTH = {1: 1.74, 2: 2.29, 3: 2.68}


def _length(facts: Facts) -> float:
    """Measured accept length, if enough was drafted to judge by."""
    length, drafts = float(facts["recent.accept_length"]), facts["recent.drafts"]
    if drafts < ENOUGH_DRAFTS:
        raise MissingFact(
            f"only {drafts:.0f} drafts were seen ({facts.origin('recent.drafts')}); {ENOUGH_DRAFTS} are needed: "
            "send requests, or --interval 10"
        )
    return length


def _gated(facts: Facts) -> bool:
    """Whether the draft gate runs: then rounds are shorter than k, and what they read cannot be told from k."""
    return bool(facts.get("record.choices", {}).get("draft_gate", ["off"])[0] != "off")


@check("log", "live")
def accept_length(facts: Facts) -> Verdict:
    """Tokens per verify step are well above 1, over the last seconds and not since boot.

    At chance the draft is noise: its head reads other bytes than the target's, its weights were lost, or the text is
    random tokens. Every draft then costs a step and earns nothing. Acceptance near 100% is no proof of health: see
    head_scale.
    """
    if not facts["serve.k"]:
        return ok("no speculation")
    k, length = facts["serve.k"], _length(facts)
    where = facts.origin("recent.accept_length")
    loss = _loss(facts, k, length)
    if length < CHANCE:
        return fail(
            f"accept length {length:.2f} with k = {k}: the draft is noise ({where})",
            "see draft_head, level_2_sleep and random_tokens; until then leave --speculative-config out",
            loss,
        )
    if length < POOR:
        return warn(
            f"accept length {length:.2f} with k = {k} ({where})",
            "k = 1, or no speculation, for such text",
            loss,
        )
    return ok(f"accept length {length:.2f} with k = {k} ({where})")


def _loss(facts: Facts, k: int, length: float) -> str:
    if _gated(facts):
        return ""
    gain = costs.speculation_gain(facts, k, length)
    return f"reads {1 / gain:.1f} times the bytes of plain decoding per token" if gain and gain < 1 else ""


@check("log", "live")
def draft_positions(facts: Facts) -> Verdict:
    """Every draft position is accepted now and then; one that never is costs a draft step and a verified token."""
    if not facts["serve.k"]:
        return ok("no speculation")
    _length(facts)
    rates = [float(rate) for rate in facts["recent.per_position"]]
    if not rates:
        return unknown("the server counts no positions")
    dead = [number for number, rate in enumerate(rates, 1) if rate < DEAD]
    shown = ", ".join(f"{rate:.0%}" for rate in rates)
    if len(dead) == len(rates):
        return fail(
            f"no position is accepted ({shown})",
            "see accept_length; until it is mended, leave --speculative-config out",
            costs.useless_drafts(facts, len(rates), 0),
        )
    if dead and _gated(facts):
        return ok(
            f"accepted per position: {shown}; the draft gate verifies the others only when they are likely"
        )
    if dead:
        useful = dead[0] - 1
        return warn(
            f"position {dead[0]} of {len(rates)} is never accepted ({shown})",
            f"num_speculative_tokens {useful}",
            costs.useless_drafts(facts, len(rates), useful),
        )
    return ok(f"accepted per position: {shown}")


@check("log", "live")
def draft_alarms(facts: Facts) -> Verdict:
    """The guard, which watches every round while serving, has no alarm standing.

    It remembers what happened before doctor looked, so an idle server still tells: draft_chance (drafts are noise),
    draft_tail (last positions never accepted), draft_slow (slower than plain decoding).
    """
    k = facts["serve.k"]
    if not k:
        return ok("no speculation")
    alarms = facts["recent.alarms"]
    if "draft_chance" in alarms:
        return fail(
            f"the guard's alarm draft_chance stands: {alarms['draft_chance']}",
            "see draft_head, level_2_sleep and random_tokens; until then leave --speculative-config out",
            costs.useless_drafts(facts, k, 0),
        )
    if alarms:
        alarm, message = next(iter(alarms.items()))
        return warn(
            f"the guard's alarm {alarm} stands: {message}", "a smaller num_speculative_tokens for such text"
        )
    return ok("no alarm of the guard stands")


@check("log", "live")
def draft_gate(facts: Facts) -> Verdict:
    """The draft gate runs if it was asked for (ling.draft_gate).

    It needs the draft's probabilities, the byte model of the checkpoint and, with CUDA graphs, graphs of every draft
    length; where one is missing, every draft token is verified as without it, and one line in the log says why.
    """
    if not facts["serve.k"]:
        return ok("no speculation")
    choices = facts["record.choices"]
    asked = facts.get("serve.draft_gate_option") or facts.get("serve.ling", {}).get("draft_gate", "off")
    if "draft_gate" not in choices:
        if asked == "off":
            return ok("every draft token is verified (ling.draft_gate=off)")
        return unknown(f"ling.draft_gate={asked} was asked for, and the plugin recorded no decision about it")
    choice, reason = choices["draft_gate"]
    if choice == "off":
        return warn(
            f"ling.draft_gate={asked} does not run, and asynchronous scheduling is off all the same: {reason}",
            "leave ling.draft_gate out" + (", or --enforce-eager" if "CUDA graphs" in reason else ""),
        )
    return ok(f"draft_gate = {choice} ({reason})")


@check("log", "live")
def speculation_pays(facts: Facts) -> Verdict:
    """At the measured accept length, a speculative round reads fewer bytes per token than plain decoding.

    A round with k drafts verifies k + 1 tokens, and each picks its own experts: at k = 3 it reads about twice the
    bytes of one token, so an accept length below that is slower than no speculation at all.
    """
    k = facts["serve.k"]
    if not k:
        return ok("no speculation")
    length = _length(facts)
    gain = costs.speculation_gain(facts, k, length)
    if gain is None:
        if "_checkpoint.shape" not in facts:
            facts["checkpoint.format"]
        return unknown("the byte model knows no MTP layer in this checkpoint")
    said = f"k = {k} at accept length {length:.2f}: {gain:.2f} times as fast as plain decoding, by bytes"
    if gain < 1 and _gated(facts):
        return unknown(f"the draft gate verifies fewer than {k} tokens a round, so its bytes are not known")
    if gain < 1:
        better = max(range(k), key=lambda fewer: _shorter(facts, fewer, length, k))
        fix = f"num_speculative_tokens {better}" if better else "leave --speculative-config out"
        return warn(said, fix, f"reads {1 / gain:.2f} times the bytes per token")
    return ok(said)


def _shorter(facts: Facts, fewer: int, length: float, k: int) -> float:
    """Gain of fewer drafts at the same acceptance per position."""
    if fewer == 0:
        return 1.0
    # The acceptance that gives this length at k, found by halving.
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < length else (low, middle)
    return costs.speculation_gain(facts, fewer, sum(low**i for i in range(fewer + 1))) or 0.0


@check("live", "log")
def concurrency(facts: Facts) -> Verdict:
    """Speculation still pays at the number of requests that run together.

    Sequences decoded together share the reads of the dense weights, so drafts gain less while their experts cost as
    much; published measurements of this model lose 26% to 58% with MTP at 16 sequences.
    """
    k = facts["serve.k"]
    if not k:
        return ok("no speculation")
    running = int(facts["recent.running"])
    if running <= 1:
        return ok(f"{running} requests run together")
    measured = facts.get("recent.accept_length")
    length = measured or PUBLISHED_LENGTH.get(k, 2.0)
    gain = costs.batched_gain(facts, k, length, running)
    if gain is None:
        facts["checkpoint.format"]
        return unknown("the byte model knows no MTP layer in this checkpoint")
    known = f"accept length {length:.2f}" + ("" if measured else " (published, not measured here)")
    loses = next((n for n in range(2, 65) if (costs.batched_gain(facts, k, length, n) or 1) < 1), None)
    said = f"{running} requests run together; k = {k} at {known}: {gain:.2f} times as fast, by bytes"
    said += f"; loses from {loses} requests on" if loses else ""
    if gain < 1 or running >= 16:
        return warn(
            said,
            "start a server for many users without --speculative-config",
            "published: 26% to 58% slower with MTP at 16 sequences (H20)",
        )
    return ok(said)


@check("log", "live")
def level_2_sleep(facts: Facts) -> Verdict:
    """The draft's weights survived: no level-2 sleep since the start.

    Level 2 discards all weights, and the reload afterwards fills the target alone: the MTP layer then holds garbage,
    and acceptance falls to chance without a word.
    """
    if not facts["serve.k"]:
        return ok("no speculation")
    sleeps = facts.get("recent.level_2_sleeps")
    if sleeps is None and "log.slept_level_2" in facts:
        sleeps = int(facts["log.slept_level_2"])
    if sleeps is None:
        sleeps = facts["recent.level_2_sleeps" if "live" in facts.sources else "log.slept_level_2"]
    if sleeps or facts.get("recent.discarded"):
        return fail(
            "the server went through a level-2 sleep: the draft's weights were discarded, and only the target's "
            "are loaded again",
            "restart the server, or sleep with level 1",
            costs.useless_drafts(facts, facts["serve.k"], 0),
        )
    return ok("no level-2 sleep since the start")
