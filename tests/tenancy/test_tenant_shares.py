"""Shares of a bound: however much a tenant takes, the next one still finds as much as it may take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rootgraft.tenancy.tenant_shares import TenantShares


def fill(shares: TenantShares, tenant: str) -> int:
    count = 0
    while shares.left_for(tenant) >= 1:
        shares.take(tenant)
        count += 1
    return count


def test_a_tenant_gets_half_and_the_next_as_much_as_is_left() -> None:
    shares = TenantShares(64)
    assert [fill(shares, tenant) for tenant in "abc"] == [32, 16, 8]
    shares.give_back("a", 32)
    assert fill(shares, "d") == 20 and shares.total == 44
    assert fill(TenantShares(64), "") == 64, "without keys there is one tenant"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30)), max_size=40))
def test_nobody_holds_more_than_what_is_left(asked: list[tuple[str, int]]) -> None:
    shares = TenantShares(100)
    for tenant, amount in asked:
        if amount <= shares.left_for(tenant):
            left = shares.most - shares.total
            shares.take(tenant, amount)
            assert shares.held(tenant) <= left
        assert shares.total == sum(map(shares.held, "abcd")) <= 100
