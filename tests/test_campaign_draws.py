"""The draws of ``interop.campaign``: what a seed gives, and that each can run."""

from __future__ import annotations

import pytest

from interop.campaign import tools
from interop.campaign.draws import DEVICES, Draw, block_of, draw
from interop.campaign.explanations import explanation

COUNT = 400

each_campaign = pytest.mark.parametrize("campaign", DEVICES)


def draws(campaign: str, seed: int = 1) -> list[Draw]:
    return [draw(campaign, seed, number) for number in range(COUNT)]


@each_campaign
def test_a_draw_depends_on_its_seed_and_number_alone(campaign: str) -> None:
    found = draws(campaign)
    assert [draw(campaign, 1, number) for number in reversed(range(COUNT))] == found[::-1]
    assert draws(campaign, seed=2) != found


@each_campaign
def test_the_draws_of_a_block_share_the_state_of_the_link(campaign: str) -> None:
    links = {(block_of(each.number), each.link) for each in draws(campaign)}
    assert len(links) == block_of(COUNT - 1) + 1


@each_campaign
def test_at_least_one_end_of_each_draw_is_ours(campaign: str) -> None:
    assert all(each.server.is_ours or each.client.is_ours for each in draws(campaign))


@each_campaign
def test_some_hundred_draws_have_each_fault_end_and_family(campaign: str) -> None:
    found = draws(campaign)
    places = {"rxe": {"rxe", "soft"}, "siw": {"siw0", "siw1"}}[campaign]
    assert {each.family for each in found} == {4, 6}
    assert {each.link.name for each in found} == {
        *("clean", "loss", "duplication", "reordering", "all of these", "down"),
    }
    assert {each.kill.victim for each in found if each.kill} == {"server", "client"}
    assert {end.device for each in found for end in (each.server, each.client)} == places
    assert {each.tool for each in found} == {each.tool for each in found if each.kill}


def test_tools_that_count_datagrams_have_a_clean_link() -> None:
    assert {each.link.name for each in draws("rxe") if each.tool in ("udaddy", "mckey")} == {"clean"}


@each_campaign
def test_each_draw_has_a_command_for_both_ends(campaign: str) -> None:
    for each in draws(campaign):
        for end, command in ((each.server, tools.server(each)), (each.client, tools.client(each))):
            is_pyverbs = each.tool == "verbs" and not end.is_ours
            assert command.is_python == (end.is_ours or is_pyverbs)
            assert all(isinstance(argument, str) for argument in command.argv)


def test_a_failure_without_words_of_the_peer_is_not_explained() -> None:
    for each in draws("rxe"):
        assert not explanation(each, "our client hangs", "--- client, status None:")
