"""Every cell of the queue pair state table: allowed, with each attribute missing, with each unexpected attribute."""

from __future__ import annotations

import errno
import itertools

import pytest

from rdmacm import RdmaError
from rdmacm.verbs import (
    CQ,
    PD,
    QP,
    AHAttr,
    Context,
    GlobalRoute,
    QPAttr,
    QPAttrMask,
    QPInitAttr,
    QPState,
    QPType,
)
from rdmacm.verbs.qpstate import TRANSITIONS, find_fault, names, states_between, step_mask
from support.rows import for_each
from support.verbs import GIDS, RecordingDevice, RecordingQP

M, S = QPAttrMask, QPState
TYPES = (QPType.RC, QPType.UC, QPType.UD, QPType.XRC_SEND, QPType.XRC_RECV)
NAMES = [qp_type.name for qp_type in TYPES]
BITS = [bit for bit in M if bit is not M.STATE]

# The specification's table, independently of the sources: transition → type → required, optional.
_ADDRESSED = "PKEY_INDEX PORT ACCESS_FLAGS"
_PATHS = "ALT_PATH PATH_MIG_STATE"
_RUNNING = {
    "RC": ("", "CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE MIN_RNR_TIMER"),
    "UC": ("", "CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE"),
    "UD": ("", "CUR_STATE QKEY"),
    "XRC_SEND": ("", "CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE"),
    "XRC_RECV": ("", "CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE MIN_RNR_TIMER"),
}
_XRC = ("XRC_SEND", "XRC_RECV")
SPECIFIED: dict[str, dict[str, tuple[str, str]]] = {
    "RESET INIT": {**dict.fromkeys(("RC", "UC", *_XRC), (_ADDRESSED, "")), "UD": ("PKEY_INDEX PORT QKEY", "")},
    "INIT INIT": {**dict.fromkeys(("RC", "UC", *_XRC), ("", _ADDRESSED)), "UD": ("", "PKEY_INDEX PORT QKEY")},
    "INIT RTR": {
        "RC": (
            "AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER",
            "ALT_PATH ACCESS_FLAGS PKEY_INDEX",
        ),
        "UC": ("AV PATH_MTU DEST_QPN RQ_PSN", "ALT_PATH ACCESS_FLAGS PKEY_INDEX"),
        "UD": ("", "PKEY_INDEX QKEY"),
        "XRC_SEND": ("AV PATH_MTU DEST_QPN RQ_PSN", "ALT_PATH ACCESS_FLAGS PKEY_INDEX"),
        "XRC_RECV": (
            "AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER",
            "ALT_PATH ACCESS_FLAGS PKEY_INDEX",
        ),
    },
    "RTR RTS": {
        "RC": (
            "SQ_PSN TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC",
            "CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE",
        ),
        "UC": ("SQ_PSN", "CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE"),
        "UD": ("SQ_PSN", "CUR_STATE QKEY"),
        "XRC_SEND": (
            "SQ_PSN TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC",
            "CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE",
        ),
        "XRC_RECV": ("SQ_PSN TIMEOUT", "CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE"),
    },
    "RTS RTS": _RUNNING,
    "RTS SQD": dict.fromkeys(NAMES, ("", "EN_SQD_ASYNC_NOTIFY")),
    "SQD RTS": _RUNNING,
    "SQD SQD": {
        "RC": (
            "",
            f"{_ADDRESSED} AV TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC MAX_DEST_RD_ATOMIC {_PATHS} MIN_RNR_TIMER",
        ),
        "UC": ("", "AV ALT_PATH ACCESS_FLAGS PKEY_INDEX PATH_MIG_STATE"),
        "UD": ("", "PKEY_INDEX QKEY"),
        "XRC_SEND": ("", f"{_ADDRESSED} AV TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC {_PATHS}"),
        "XRC_RECV": ("", f"{_ADDRESSED} AV TIMEOUT MAX_DEST_RD_ATOMIC {_PATHS} MIN_RNR_TIMER"),
    },
    "SQE RTS": {"UC": ("", "CUR_STATE ACCESS_FLAGS"), "UD": ("", "CUR_STATE QKEY")},
}
for _state in S:
    SPECIFIED[f"{_state.name} RESET"] = dict.fromkeys(NAMES, ("", ""))
    if _state is not S.RESET:
        SPECIFIED[f"{_state.name} ERR"] = dict.fromkeys(NAMES, ("", ""))


def mask_of(text: str) -> QPAttrMask:
    mask = M(0)
    for name in text.split():
        mask |= M[name]
    return mask


CELLS = [(t, before, after) for t in TYPES for before, after in itertools.product(S, S)]


@for_each(("qp_type", "before", "after"), CELLS, ids=lambda x: x.name)
def test_transitions_match_the_specification(qp_type: QPType, before: QPState, after: QPState) -> None:
    specified = SPECIFIED.get(f"{before.name} {after.name}", {}).get(qp_type.name)
    if specified is None:
        for mask in (M.STATE, M.STATE | M.QKEY, *(M.STATE | bit for bit in BITS)):
            assert (
                find_fault(qp_type, before, after, mask)
                == f"no transition from {before.name} to {after.name} for {qp_type.name}"
            )
        return
    required, optional = map(mask_of, specified)
    assert find_fault(qp_type, before, after, M.STATE | required) is None
    assert find_fault(qp_type, before, after, M.STATE | required | optional) is None
    for bit in required:
        text = find_fault(qp_type, before, after, (M.STATE | required | optional) & ~bit)
        assert text is not None
        assert text.endswith(f"missing {bit.name}")
    for bit in BITS:
        text = find_fault(qp_type, before, after, M.STATE | required | bit)
        if bit & (required | optional):
            assert text is None
        else:
            assert text is not None
            assert text.endswith(f"unexpected {bit.name}")


def test_table_has_the_specified_transitions() -> None:
    ours = {(f"{before.name} {after.name}", t.name) for (before, after), row in TRANSITIONS.items() for t in row}
    assert ours == {(cell, name) for cell, row in SPECIFIED.items() for name in row}


def test_all_faults_are_reported_together() -> None:
    text = find_fault(QPType.RC, S.RESET, S.INIT, M.STATE | M.PORT | M.QKEY | M.SQ_PSN)
    assert text == "RESET to INIT of RC: missing ACCESS_FLAGS, PKEY_INDEX; unexpected QKEY, SQ_PSN"
    assert find_fault(QPType.RC, S.RTS, S.RTS, M(1 << 30)) == "RTS to RTS of RC: unknown attribute bits 0x40000000"
    assert find_fault(QPType.RC, S.RTS, S.RTS, M.QKEY | M(1 << 30)) == (
        "RTS to RTS of RC: unexpected QKEY; unknown attribute bits 0x40000000"
    )
    assert names(M.PORT | M.STATE) == "STATE, PORT"


def test_states_between_lists_the_steps() -> None:
    assert states_between(S.RESET, S.RTS) == (S.INIT, S.RTR, S.RTS)
    assert states_between(S.INIT, S.RTR) == (S.RTR,)
    assert (
        states_between(S.RTR, S.RTS)
        == states_between(S.SQD, S.RTS)
        == states_between(S.RTS, S.RTS)
        == states_between(S.SQE, S.RTS)
        == (S.RTS,)
    )
    assert states_between(S.RTS, S.INIT) == (S.INIT,)
    assert states_between(S.RESET, S.ERR) == (S.ERR,)
    assert step_mask(QPType.UD, S.INIT, S.INIT) == M.STATE | M.PKEY_INDEX | M.PORT | M.QKEY
    assert step_mask(QPType.RC, S.RTS, S.INIT) == M.STATE


# -- through a queue pair ---------------------------------------------------------------------------------------


class Rig:
    """A queue pair whose state the test sets in its backend."""

    def __init__(self, device: RecordingDevice, context: Context, qp_type: QPType) -> None:
        self.pd = PD(context)
        self.cq = CQ(context, 16)
        self.qp = QP(self.pd, QPInitAttr(qp_type=qp_type, scq=self.cq, rcq=self.cq))
        found = next(made for made in device.living if isinstance(made, RecordingQP))
        self.backend: RecordingQP = found

    def close(self) -> None:
        self.qp.close()
        self.cq.close()


def full(state: QPState = S.INIT, **changes: object) -> QPAttr:
    """Attributes that are valid for every transition."""
    vector = AHAttr(is_global=True, gr=GlobalRoute(dgid=GIDS[0], sgid_index=1))
    attr = QPAttr(qp_state=state, ah_attr=vector, alt_ah_attr=vector, dest_qp_num=0x22, timeout=14, retry_cnt=7)
    for name, value in changes.items():
        setattr(attr, name, value)
    return attr


@pytest.mark.parametrize("qp_type", TYPES[:3], ids=lambda x: x.name)
def test_only_allowed_transitions_reach_the_device(device: RecordingDevice, context: Context, qp_type: QPType) -> None:
    rig = Rig(device, context, qp_type)
    for before, after in itertools.product(S, S):
        allowed = SPECIFIED.get(f"{before.name} {after.name}", {}).get(qp_type.name)
        mask = M.STATE | mask_of(" ".join(allowed) if allowed else "")
        attr = full(after, cur_qp_state=before)
        rig.backend.state, rig.backend.modified = before, []
        if allowed is None:
            with pytest.raises(RdmaError, match=r"modify_qp: no transition from") as raised:
                rig.qp.modify(attr, mask)
            assert raised.value.errno == errno.EINVAL
            assert rig.backend.modified == []
            assert rig.qp.state is before
        else:
            rig.qp.modify(attr, mask)
            assert rig.backend.modified == [(after, mask)]
            assert rig.qp.state is rig.qp.qp_state is after
    rig.close()


def test_step_methods_pass_through_each_state(device: RecordingDevice, context: Context) -> None:
    rig = Rig(device, context, QPType.RC)
    attr = full(S.RESET)
    rig.qp.to_rts(attr)
    rc = {name: M.STATE | mask_of(row["RC"][0]) for name, row in SPECIFIED.items() if "RC" in row}
    steps = [(S.INIT, rc["RESET INIT"]), (S.RTR, rc["INIT RTR"]), (S.RTS, rc["RTR RTS"])]
    assert rig.backend.modified == steps
    assert attr.qp_state is S.RESET, "the caller's attributes are not changed"

    rig.qp.modify(QPAttr(qp_state=S.SQD), M.STATE)
    rig.qp.to_rts(attr)
    rig.qp.to_error()
    assert rig.backend.modified[3:] == [(S.SQD, M.STATE), (S.RTS, M.STATE), (S.ERR, M.STATE)]

    rig.qp.modify(QPAttr(), M.STATE)
    assert rig.qp.state is S.RESET
    with pytest.raises(RdmaError, match="no transition from RESET to ERR"):
        rig.qp.to_error()
    rig.backend.modified.clear()
    rig.qp.to_init(attr)
    rig.qp.to_init(attr)
    rig.qp.to_rtr(attr)
    assert rig.backend.modified == [steps[0], *steps[:2]]
    rig.qp.to_rts(attr)
    assert rig.backend.modified == [steps[0], *steps]
    rig.close()


def test_modify_can_keep_the_state(device: RecordingDevice, context: Context) -> None:
    rig = Rig(device, context, QPType.RC)
    rig.backend.state = S.RTS
    rig.qp.modify(full(S.RESET, min_rnr_timer=3, cur_qp_state=S.RTS), M.MIN_RNR_TIMER | M.CUR_STATE)
    assert rig.qp.state is S.RTS
    with pytest.raises(RdmaError, match="the queue pair is in RTS, not in cur_qp_state"):
        rig.qp.modify(full(cur_qp_state=S.SQD), M.CUR_STATE)
    with pytest.raises(RdmaError, match="qp_state is 99, not a QPState"):
        rig.qp.modify(full(qp_state=99), M.STATE)
    rig.close()


WRONG: list[tuple[str, QPState, QPAttrMask, dict[str, object]]] = [
    ("rq_psn is 16777216, and may be 0 to 16777215", S.INIT, M.RQ_PSN, {"rq_psn": 1 << 24}),
    ("sq_psn is -1", S.RTR, M.SQ_PSN, {"sq_psn": -1}),
    ("dest_qp_num is", S.INIT, M.DEST_QPN, {"dest_qp_num": 1 << 24}),
    ("timeout is 32, and may be 0 to 31", S.RTR, M.TIMEOUT, {"timeout": 32}),
    ("retry_cnt is 8", S.RTR, M.RETRY_CNT, {"retry_cnt": 8}),
    ("rnr_retry is 8", S.RTR, M.RNR_RETRY, {"rnr_retry": 8}),
    ("min_rnr_timer is 32", S.INIT, M.MIN_RNR_TIMER, {"min_rnr_timer": 32}),
    ("max_rd_atomic is 9, and may be 0 to 8", S.RTR, M.MAX_QP_RD_ATOMIC, {"max_rd_atomic": 9}),
    ("max_dest_rd_atomic is 17, and may be 0 to 16", S.INIT, M.MAX_DEST_RD_ATOMIC, {"max_dest_rd_atomic": 17}),
    ("path_mtu is 6", S.INIT, M.PATH_MTU, {"path_mtu": 6}),
    ("unknown qp_access_flags 0x80000000", S.RESET, M.ACCESS_FLAGS, {"qp_access_flags": 1 << 31}),
    ("no port 2", S.RESET, M.PORT, {"port_num": 2}),
    ("no P_Key at index 1", S.RESET, M.PKEY_INDEX, {"pkey_index": 1}),
    ("needs a GID", S.INIT, M.AV, {"ah_attr": AHAttr()}),
    ("the destination GID is zero", S.INIT, M.AV, {"ah_attr": AHAttr(is_global=True)}),
    (
        "port 1 has no GID at index 4",
        S.INIT,
        M.AV,
        {"ah_attr": AHAttr(is_global=True, gr=GlobalRoute(dgid=GIDS[0], sgid_index=4))},
    ),
    ("no port 3", S.INIT, M.AV, {"ah_attr": AHAttr(is_global=True, port_num=3, gr=GlobalRoute(dgid=GIDS[0]))}),
    ("needs a GID", S.INIT, M.ALT_PATH, {"alt_ah_attr": AHAttr()}),
]


@pytest.mark.parametrize(("text", "before", "bit", "changes"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_values_out_of_range_are_refused(
    device: RecordingDevice,
    context: Context,
    text: str,
    before: QPState,
    bit: QPAttrMask,
    changes: dict[str, object],
) -> None:
    rig = Rig(device, context, QPType.RC)
    rig.backend.state = before
    after = {S.RESET: S.INIT, S.INIT: S.RTR, S.RTR: S.RTS}[before]
    mask = step_mask(QPType.RC, before, after) | bit
    rig.qp.modify(full(after), mask)
    rig.backend.state, rig.backend.modified = before, []
    with pytest.raises(RdmaError, match=text) as raised:
        rig.qp.modify(full(after, **changes), mask)
    assert raised.value.errno == errno.EINVAL
    assert rig.backend.modified == []
    # Attributes outside the mask are not checked.
    if mask & ~bit & ~M.STATE and bit is M.ALT_PATH:
        rig.qp.modify(full(after, **changes), mask & ~bit)
    rig.close()
