"""The roles of a ReFL run: what gives the reward, what is only watched, and on which ranks each of them is.

`roles` is the root of a ReFL recipe. `roles.actor` holds flat keys like any other line of a recipe; it has
the ranks that no other role takes. The other roles name a part of their own and where it is placed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import AfterValidator, JsonValue

from wan_trainer.config.specs import RolesSpec
from wan_trainer.config.suggest import suggest
from wan_trainer.config.target import KEY, as_target, malformed, well_formed

ACTOR, REWARD, MONITOR, REFERENCE = "actor", "reward", "monitor", "reference"
SCORERS = (REWARD, MONITOR)
ROLES = (*SCORERS, REFERENCE)
_EXAMPLE = f"write reward: {{{KEY}: my_module.MyReward, placement: {{share_with: actor}}}}"


def well_formed_roles(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The mapping itself, once every rule that needs no number of ranks holds. Imports nothing."""
    for name in value:
        if name == ACTOR:
            raise malformed(
                "has an actor that is not a mapping of keys in a file",
                "write its keys below it there, and as flags of their own on the command line",
            )
        if name not in ROLES:
            advice = suggest(name, (ACTOR, *ROLES)) or f"; the roles are {', '.join((ACTOR, *ROLES))}"
            raise malformed(f"has a role {name}, which there is not", advice[2:])
    if REWARD not in value:
        raise malformed("has no reward", _EXAMPLE)
    for name, role in value.items():
        _check_role(name, role)
    for name in value:
        _check_home(name, value)
    return value


RolesMapping = Annotated[dict[str, JsonValue], AfterValidator(well_formed_roles)]
"""`{reward: {_target_, config, placement}, ...}`; `actor` is taken out of it where a file is read."""


def _check_role(name: str, role: JsonValue) -> None:
    allowed = ("placement",) if name == REFERENCE else (KEY, "config", "placement")
    if not isinstance(role, Mapping):
        raise malformed(f"has {name}: {role}, which is not a mapping", _EXAMPLE)
    for key in role:
        if key not in allowed:
            raise malformed(f"has {name}.{key}, which a {name} does not take", f"use {', '.join(allowed)}")
    if name in SCORERS:
        config = role.get("config", {})
        if not isinstance(config, Mapping):
            raise malformed(
                f"has {name}.config: {config}, which is not a mapping", "write `argument: value` lines"
            )
        if KEY in config:
            raise malformed(f"has {KEY} in {name}.config", f"write it as {name}.{KEY}")
        well_formed(_call(role))
    placement = role.get("placement", {})
    if not isinstance(placement, Mapping) or len(placement) > 1 or set(placement) - {"share_with", "ranks"}:
        raise malformed(
            f"has {name}.placement: {placement}",
            "write {share_with: actor}, or {ranks: N} for N ranks of its own",
        )
    if "ranks" not in placement:
        return
    ranks = placement["ranks"]
    if name != REWARD:
        raise malformed(f"gives {name} ranks of its own", "only a reward can have them; use share_with")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise malformed(f"has {name}.placement.ranks: {ranks}", "use a whole number from 1")


def _check_home(name: str, roles: Mapping[str, JsonValue]) -> None:
    """Follow share_with to the actor or to ranks of its own."""
    seen = [name]
    while True:
        placement = _placement(roles, seen[-1])
        if "ranks" in placement:
            break
        host = str(placement.get("share_with", ACTOR))
        if host == ACTOR:
            break
        if host not in roles:
            raise malformed(
                f"has {seen[-1]}.placement.share_with: {host}, which is no role here",
                f"use one of {', '.join(role for role in (ACTOR, *roles) if role != seen[-1])}",
            )
        seen.append(host)
        if host in seen[:-1]:
            raise malformed(
                f"places roles in a circle: {' shares with '.join(seen[seen.index(host) :])}",
                "let one of them share with actor",
            )
    if name == REFERENCE and len(seen) > 1:
        raise malformed(
            f"places reference with {seen[-1]}",
            "use share_with: actor, whose weights without what is trained it is",
        )


def _placement(roles: Mapping[str, JsonValue], name: str) -> Mapping[str, Any]:
    role = cast("Mapping[str, Any]", roles[name])
    return role.get("placement", {})


def _call(role: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The role as a target mapping: its arguments beside `_target_`."""
    return {KEY: role.get(KEY), **cast("Mapping[str, JsonValue]", role.get("config", {}))}


def as_roles(value: Mapping[str, JsonValue]) -> RolesSpec:
    """The specification of a `RolesMapping`."""
    roles = cast("Mapping[str, Mapping[str, JsonValue]]", value)
    monitor = roles.get(MONITOR)
    return RolesSpec(
        reward=as_target(_call(roles[REWARD])),
        monitor=None if monitor is None else as_target(_call(monitor)),
        reward_ranks=int(_placement(value, REWARD).get("ranks", 0)),
        monitor_with_reward=monitor is not None and _placement(value, MONITOR).get("share_with") == REWARD,
    )


def without_placement(value: Mapping[str, JsonValue] | None) -> dict[str, JsonValue] | None:
    """What a resumed run must have in common: where a role is may change, what it is may not."""
    if value is None:
        return None
    roles = cast("Mapping[str, Mapping[str, JsonValue]]", value)
    return {
        name: {key: part for key, part in role.items() if key != "placement"} for name, role in roles.items()
    }
