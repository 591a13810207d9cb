/* Requests that a program builds by calls: ibv_wr_start(3) to ibv_wr_complete(3). They are posted as one list. */
#include "objects.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_CAPACITY = 16 };

/* A request with its elements, and the bytes of inline data. */
struct built {
    struct ibv_send_wr wr;
    struct ibv_sge elements[RDMACM_MOST_ELEMENTS];
    uint8_t *bytes;
};

struct batch {
    size_t count, capacity;
    int error;
    struct built *items;
};

static struct batch *batch_of(struct ibv_qp_ex *ex) { return ((struct qp *)ex)->batch; }

/* -- the list ---------------------------------------------------------------------------------------------------------- */

static void clear(struct batch *batch) {
    for (size_t i = 0; i < batch->count; i++)
        free(batch->items[i].bytes);
    batch->count = 0;
    batch->error = 0;
}

/* Begin a request; where there is no memory, one that is not posted. */
static struct built *begin(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode) {
    static struct built lost;
    struct batch *batch = batch_of(ex);
    if (batch->count == batch->capacity) {
        size_t capacity = batch->capacity ? 2 * batch->capacity : FIRST_CAPACITY;
        struct built *items = realloc(batch->items, capacity * sizeof *items);
        if (!items) {
            batch->error = ENOMEM;
            return &lost;
        }
        batch->items = items;
        batch->capacity = capacity;
    }
    struct built *built = &batch->items[batch->count++];
    built->bytes = NULL;
    built->wr = (struct ibv_send_wr){.wr_id = ex->wr_id, .opcode = opcode, .send_flags = ex->wr_flags};
    return built;
}

static struct built *last(struct ibv_qp_ex *ex) {
    struct batch *batch = batch_of(ex);
    return batch->count ? &batch->items[batch->count - 1] : NULL;
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *address, size_t length);

static void wr_start(struct ibv_qp_ex *ex) { clear(batch_of(ex)); }
static void wr_abort(struct ibv_qp_ex *ex) { clear(batch_of(ex)); }

static int wr_complete(struct ibv_qp_ex *ex) {
    struct batch *batch = batch_of(ex);
    struct ibv_send_wr *bad;
    int code = batch->error;
    for (size_t i = 0; i < batch->count; i++) {
        batch->items[i].wr.sg_list = batch->items[i].elements;
        batch->items[i].wr.next = i + 1 < batch->count ? &batch->items[i + 1].wr : NULL;
    }
    if (!code && batch->count)
        code = verbs_post_send(&ex->qp_base, &batch->items[0].wr, &bad);
    clear(batch);
    return code;
}

/* -- what is sent ------------------------------------------------------------------------------------------------------ */

static void set_remote(struct built *built, uint32_t rkey, uint64_t address) {
    built->wr.wr.rdma.remote_addr = address;
    built->wr.wr.rdma.rkey = rkey;
}

static void wr_send(struct ibv_qp_ex *ex) { begin(ex, IBV_WR_SEND); }

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm) { begin(ex, IBV_WR_SEND_WITH_IMM)->wr.imm_data = imm; }

static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t rkey) {
    begin(ex, IBV_WR_SEND_WITH_INV)->wr.invalidate_rkey = rkey;
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address) {
    set_remote(begin(ex, IBV_WR_RDMA_WRITE), rkey, address);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, __be32 imm) {
    struct built *built = begin(ex, IBV_WR_RDMA_WRITE_WITH_IMM);
    set_remote(built, rkey, address);
    built->wr.imm_data = imm;
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address) {
    set_remote(begin(ex, IBV_WR_RDMA_READ), rkey, address);
}

static void build_atomic(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t address,
                         uint64_t compare_add, uint64_t swap) {
    struct built *built = begin(ex, opcode);
    built->wr.wr.atomic.remote_addr = address;
    built->wr.wr.atomic.rkey = rkey;
    built->wr.wr.atomic.compare_add = compare_add;
    built->wr.wr.atomic.swap = swap;
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, uint64_t compare, uint64_t swap) {
    build_atomic(ex, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, address, compare, swap);
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, uint64_t add) {
    build_atomic(ex, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, address, add, 0);
}

static void wr_atomic_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, const void *value) {
    set_remote(begin(ex, IBV_WR_ATOMIC_WRITE), rkey, address);
    wr_set_inline_data(ex, (void *)(uintptr_t)value, sizeof(uint64_t));
}

/* struct ibv_send_wr has no place for what a FLUSH has, so it is where an atomic has its operands. */
static void wr_flush(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, size_t length, uint8_t placement,
                     uint8_t level) {
    if (length > UINT32_MAX)
        batch_of(ex)->error = EINVAL;
    build_atomic(ex, IBV_WR_FLUSH, rkey, address, length, (uint64_t)level << 8 | placement);
}

static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t rkey) { begin(ex, IBV_WR_LOCAL_INV)->wr.invalidate_rkey = rkey; }

static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info) {
    struct built *built = begin(ex, IBV_WR_BIND_MW);
    built->wr.bind_mw.mw = mw;
    built->wr.bind_mw.rkey = rkey;
    built->wr.bind_mw.bind_info = *info;
}

/* -- its data ---------------------------------------------------------------------------------------------------------- */

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *list) {
    struct built *built = last(ex);
    if (!built || count > RDMACM_MOST_ELEMENTS) {
        batch_of(ex)->error = EINVAL;
        return;
    }
    memcpy(built->elements, list, count * sizeof *list);
    built->wr.num_sge = (int)count;
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t address, uint32_t length) {
    wr_set_sge_list(ex, 1, &(struct ibv_sge){.addr = address, .length = length, .lkey = lkey});
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_data_buf *list) {
    struct built *built = last(ex);
    size_t total = 0;
    for (size_t i = 0; i < count; i++)
        total += list[i].length;
    uint8_t *bytes = built && total <= UINT32_MAX ? malloc(total + 1) : NULL;
    if (!bytes) {
        batch_of(ex)->error = built ? ENOMEM : EINVAL;
        return;
    }
    size_t at = 0;
    for (size_t i = 0; i < count; at += list[i++].length)
        memcpy(bytes + at, list[i].addr, list[i].length);
    free(built->bytes);
    built->bytes = bytes;
    built->elements[0] = (struct ibv_sge){.addr = (uintptr_t)bytes, .length = (uint32_t)total};
    built->wr.num_sge = 1;
    built->wr.send_flags |= IBV_SEND_INLINE;
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *address, size_t length) {
    wr_set_inline_data_list(ex, 1, &(struct ibv_data_buf){.addr = address, .length = length});
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qp_num, uint32_t qkey) {
    struct built *built = last(ex);
    if (!built)
        return;
    built->wr.wr.ud.ah = ah;
    built->wr.wr.ud.remote_qpn = qp_num;
    built->wr.wr.ud.remote_qkey = qkey;
}

static void wr_set_xrc_srqn(struct ibv_qp_ex *ex, uint32_t number) {
    struct built *built = last(ex);
    if (built)
        built->wr.qp_type.xrc.remote_srqn = number;
}

static const struct {
    uint64_t operation;
    enum ibv_wr_opcode opcode;
} operations[] = {
    {IBV_QP_EX_WITH_RDMA_WRITE, IBV_WR_RDMA_WRITE},
    {IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM},
    {IBV_QP_EX_WITH_SEND, IBV_WR_SEND},
    {IBV_QP_EX_WITH_SEND_WITH_IMM, IBV_WR_SEND_WITH_IMM},
    {IBV_QP_EX_WITH_RDMA_READ, IBV_WR_RDMA_READ},
    {IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_CMP_AND_SWP},
    {IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_FETCH_AND_ADD},
    {IBV_QP_EX_WITH_LOCAL_INV, IBV_WR_LOCAL_INV},
    {IBV_QP_EX_WITH_BIND_MW, IBV_WR_BIND_MW},
    {IBV_QP_EX_WITH_SEND_WITH_INV, IBV_WR_SEND_WITH_INV},
    {IBV_QP_EX_WITH_FLUSH, IBV_WR_FLUSH},
    {IBV_QP_EX_WITH_ATOMIC_WRITE, IBV_WR_ATOMIC_WRITE},
};

int qp_set_builders(struct qp *qp, uint64_t wanted) {
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        if (wanted & operations[i].operation && qp_has_opcode(qp, operations[i].opcode))
            wanted &= ~operations[i].operation;
    if (wanted)
        return EOPNOTSUPP;
    qp->batch = calloc(1, sizeof *qp->batch);
    if (!qp->batch)
        return ENOMEM;
    struct ibv_qp_ex *ex = &qp->ex;
    ex->wr_start = wr_start;
    ex->wr_complete = wr_complete;
    ex->wr_abort = wr_abort;
    ex->wr_send = wr_send;
    ex->wr_send_imm = wr_send_imm;
    ex->wr_send_inv = wr_send_inv;
    ex->wr_rdma_write = wr_rdma_write;
    ex->wr_rdma_write_imm = wr_rdma_write_imm;
    ex->wr_rdma_read = wr_rdma_read;
    ex->wr_atomic_cmp_swp = wr_atomic_cmp_swp;
    ex->wr_atomic_fetch_add = wr_atomic_fetch_add;
    ex->wr_local_inv = wr_local_inv;
    ex->wr_bind_mw = wr_bind_mw;
    ex->wr_set_sge = wr_set_sge;
    ex->wr_set_sge_list = wr_set_sge_list;
    ex->wr_set_inline_data = wr_set_inline_data;
    ex->wr_set_inline_data_list = wr_set_inline_data_list;
    ex->wr_set_ud_addr = wr_set_ud_addr;
    ex->wr_set_xrc_srqn = wr_set_xrc_srqn;
    ex->wr_atomic_write = wr_atomic_write;
    ex->wr_flush = wr_flush;
    return 0;
}

void qp_free_builders(struct qp *qp) {
    if (!qp->batch)
        return;
    clear(qp->batch);
    free(qp->batch->items);
    free(qp->batch);
}
