/* Memory that requests have while its key or itself goes away, or changes, and requests by ibv_wr_start(3): memory
 * gone|unmapped|changed|built|asked. Each prints "done". */
#define _GNU_SOURCE
#include "pair.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { WRITABLE = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };

static uint8_t *map(void) {
    uint8_t *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

/* Pages that are not there end the program if anything touches them. */
static void drop(struct ibv_mr *mr) {
    void *memory = mr->addr;
    CHECK(!ibv_dereg_mr(mr) && !munmap(memory, SIZE));
}

static void receive(struct ibv_qp *qp, const struct ibv_mr *mr) {
    struct ibv_sge part = {(uintptr_t)mr->addr, SIZE, mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = &part, .num_sge = 1}, *bad;
    CHECK(!(qp->srq ? ibv_post_srq_recv(qp->srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad)));
}

static void post(struct ibv_qp *qp, enum ibv_wr_opcode opcode, const struct ibv_mr *mr, const struct ibv_mr *remote) {
    struct ibv_sge part = {(uintptr_t)mr->addr, SIZE / 2, mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &part, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)remote->addr;
    wr.wr.rdma.rkey = remote->rkey;
    CHECK(!ibv_post_send(qp, &wr, &bad));
}

static void expect(struct pair *pair, struct ibv_qp *qp, enum ibv_wc_status status) {
    struct ibv_wc wc;
    int found;
    while (!(found = ibv_poll_cq(pair->cq, 1, &wc))) {
    }
    CHECK(found == 1);
    if (wc.qp_num != qp->qp_num) /* the other end's, which may come first */
        expect(pair, qp, status);
    else if (wc.status != status)
        fprintf(stderr, "%s, not %s\n", ibv_wc_status_str(wc.status), ibv_wc_status_str(status)), exit(1);
}

/* -- gone ------------------------------------------------------------------------------------------------------------ */

static void receive_is_gone(struct ibv_context *context, int is_shared) {
    struct pair pair = make_pair(context);
    struct ibv_qp *qp = pair.qps[1];
    if (is_shared) {
        struct ibv_srq_init_attr shared = {.attr = {4, 1, 0}};
        struct ibv_qp_init_attr attr = {.send_cq = pair.cq, .recv_cq = pair.cq, .qp_type = IBV_QPT_RC,
                                        .cap = {4, 4, 1, 1, 0}, .srq = ibv_create_srq(pair.pd, &shared)};
        CHECK(attr.srq && (qp = ibv_create_qp(pair.pd, &attr)));
        struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
        CHECK(!ibv_modify_qp(pair.qps[0], &reset, IBV_QP_STATE));
        connect_one(pair.qps[0], qp->qp_num, pair.gid);
        connect_one(qp, pair.qps[0]->qp_num, pair.gid);
    }
    struct ibv_mr *mr = ibv_reg_mr(pair.pd, map(), SIZE, IBV_ACCESS_LOCAL_WRITE);
    receive(qp, mr);
    drop(mr);
    post(pair.qps[0], IBV_WR_SEND, pair.mr, pair.mr);
    expect(&pair, pair.qps[0], IBV_WC_REM_OP_ERR);
}

/* A SEND that the peer was not ready for has to be sent again. */
static void send_is_gone(struct ibv_context *context) {
    struct pair pair = make_pair(context);
    struct ibv_mr *mr = ibv_reg_mr(pair.pd, map(), SIZE, 0);
    post(pair.qps[0], IBV_WR_SEND, mr, pair.mr);
    post(pair.qps[1], IBV_WR_RDMA_WRITE, pair.mr, pair.mr); /* behind it in the same socket */
    expect(&pair, pair.qps[1], IBV_WC_SUCCESS);
    drop(mr);
    receive(pair.qps[1], pair.mr);
    expect(&pair, pair.qps[0], IBV_WC_LOC_PROT_ERR);
}

/* The peer answers only then. */
static void read_is_gone(struct ibv_context *context, enum ibv_wr_opcode opcode) {
    struct pair pair = create_pair(context);
    struct ibv_mr *mr = ibv_reg_mr(pair.pd, map(), SIZE, IBV_ACCESS_LOCAL_WRITE);
    int access = WRITABLE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    CHECK(!ibv_rereg_mr(pair.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, access));
    connect_one(pair.qps[0], pair.qps[1]->qp_num, pair.gid);
    if (opcode == IBV_WR_RDMA_READ) {
        post(pair.qps[0], opcode, mr, pair.mr);
    } else {
        struct ibv_sge part = {(uintptr_t)mr->addr, 8, mr->lkey};
        struct ibv_send_wr wr = {.sg_list = &part, .num_sge = 1, .opcode = opcode}, *bad;
        wr.wr.atomic.remote_addr = (uintptr_t)pair.memory;
        wr.wr.atomic.rkey = pair.mr->rkey;
        CHECK(!ibv_post_send(pair.qps[0], &wr, &bad));
    }
    drop(mr);
    connect_one(pair.qps[1], pair.qps[0]->qp_num, pair.gid);
    expect(&pair, pair.qps[0], IBV_WC_LOC_PROT_ERR);
}

static void test_gone(void) {
    struct ibv_context *context = open_first();
    receive_is_gone(context, 0);
    receive_is_gone(context, 1);
    send_is_gone(context);
    read_is_gone(context, IBV_WR_RDMA_READ);
    read_is_gone(context, IBV_WR_ATOMIC_FETCH_AND_ADD);
}

/* -- unmapped -------------------------------------------------------------------------------------------------------- */

static volatile int thread_reads = 1;

/* In place of the C library's: the thread of the library that serves peers may be kept from reading packets. */
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    if (thread_reads || gettid() == getpid())
        return syscall(SYS_recvmsg, fd, message, flags);
    errno = EAGAIN;
    return -1;
}

static void make_ready(struct ibv_qp *qp) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7};
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_QKEY));
    attr.qp_state = IBV_QPS_RTR;
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
    attr.qp_state = IBV_QPS_RTS;
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

/* UCX unmaps the memory of the receives of a datagram queue pair, which stays registered, before it destroys that. A
 * datagram arrives meanwhile: the thread reads it, or the call that destroys the queue pair. */
static void receive_is_unmapped(struct ibv_context *context, int with_thread) {
    struct pair pair = create_pair(context);
    struct ibv_cq *cqs[] = {pair.cq, ibv_create_cq(context, 4, NULL, pair.channel, 0)}, *reported;
    void *context_of;
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_init_attr attr = {.send_cq = cqs[i], .recv_cq = cqs[i], .qp_type = IBV_QPT_UD, .cap = {4, 4, 1, 1, 0}};
        CHECK(cqs[i] && (pair.qps[i] = ibv_create_qp(pair.pd, &attr)));
        make_ready(pair.qps[i]);
    }
    struct ibv_ah_attr to = {.is_global = 1, .port_num = 1, .grh = {.dgid = pair.gid}};
    struct ibv_sge part = {(uintptr_t)pair.memory, SIZE / 2, pair.mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &part, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    wr.wr.ud.remote_qpn = pair.qps[1]->qp_num;
    wr.wr.ud.remote_qkey = 7;
    CHECK(wr.wr.ud.ah = ibv_create_ah(pair.pd, &to));
    struct ibv_mr *mr = ibv_reg_mr(pair.pd, map(), SIZE, IBV_ACCESS_LOCAL_WRITE);
    for (int i = 0; i < 3; i++)
        receive(pair.qps[1], mr);
    memset(pair.memory, 9, SIZE);

    thread_reads = with_thread;
    if (with_thread) { /* it writes while the memory is there */
        CHECK(!ibv_req_notify_cq(cqs[1], 0) && !ibv_post_send(pair.qps[0], &wr, &bad));
        CHECK(!ibv_get_cq_event(pair.channel, &reported, &context_of) && reported == cqs[1]);
        CHECK(((uint8_t *)mr->addr)[40 + SIZE / 2 - 1] == 9 && !ibv_req_notify_cq(cqs[1], 0));
        ibv_ack_cq_events(cqs[1], 1);
    }
    CHECK(!munmap(mr->addr, SIZE) && !ibv_post_send(pair.qps[0], &wr, &bad));
    if (with_thread) {
        struct ibv_wc wcs[4];
        CHECK(!ibv_get_cq_event(pair.channel, &reported, &context_of) && reported == cqs[1]);
        ibv_ack_cq_events(cqs[1], 1);
        CHECK(ibv_poll_cq(cqs[1], 4, wcs) == 3 && wcs[0].status == IBV_WC_SUCCESS);
        CHECK(wcs[1].status == IBV_WC_LOC_PROT_ERR && wcs[2].status == IBV_WC_WR_FLUSH_ERR);
    }
    CHECK(!ibv_destroy_qp(pair.qps[1]) && !ibv_dereg_mr(mr));
    thread_reads = 1;
}

static void test_unmapped(void) {
    struct ibv_context *context = open_first();
    receive_is_unmapped(context, 0);
    receive_is_unmapped(context, 1);
}

/* -- changed --------------------------------------------------------------------------------------------------------- */

static void test_changed(void) {
    struct ibv_context *context = open_first();
    struct pair pair = make_pair(context);
    struct ibv_mr *mr = ibv_reg_mr(pair.pd, map(), SIZE, IBV_ACCESS_LOCAL_WRITE);
    uint32_t key = mr->lkey;
    receive(pair.qps[1], mr);
    void *old = mr->addr;
    CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, map(), SIZE, 0));
    CHECK(!munmap(old, SIZE) && mr->lkey == key && mr->rkey == key && mr->addr != old);
    post(pair.qps[0], IBV_WR_SEND, pair.mr, pair.mr);
    expect(&pair, pair.qps[0], IBV_WC_REM_OP_ERR);

    /* The key is good for what it has become, and no longer for what it was. */
    pair = make_pair(context);
    CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS, pair.pd, NULL, 0, WRITABLE));
    memset(pair.memory, 7, SIZE);
    post(pair.qps[0], IBV_WR_RDMA_WRITE, pair.mr, mr);
    expect(&pair, pair.qps[0], IBV_WC_SUCCESS);
    CHECK(((uint8_t *)mr->addr)[0] == 7);
    CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE));
    post(pair.qps[0], IBV_WR_RDMA_WRITE, pair.mr, mr);
    expect(&pair, pair.qps[0], IBV_WC_REM_ACCESS_ERR);

    /* A receive whose memory stays takes a message; addresses begin somewhere else. */
    pair = make_pair(context);
    CHECK(mr = ibv_reg_mr_iova(pair.pd, map(), SIZE, 0x10000, IBV_ACCESS_LOCAL_WRITE));
    struct ibv_sge part = {0x10000, SIZE, mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = &part, .num_sge = 1}, *bad;
    CHECK(!ibv_post_recv(pair.qps[1], &wr, &bad));
    CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, WRITABLE));
    memset(pair.memory, 8, SIZE);
    post(pair.qps[0], IBV_WR_SEND, pair.mr, pair.mr);
    expect(&pair, pair.qps[1], IBV_WC_SUCCESS);
    CHECK(((uint8_t *)mr->addr)[0] == 8);
}

/* -- built ----------------------------------------------------------------------------------------------------------- */

/* A FLUSH, which the installed verbs.h may not have: its function follows that of the ATOMIC WRITE. */
enum { ACCESS_FLUSH_GLOBAL = 0x100, WITH_FLUSH = 0x800, GLOBAL = 1 };
typedef void (*flush)(struct ibv_qp_ex *, uint32_t rkey, uint64_t address, size_t length, uint8_t type, uint8_t level);

static struct ibv_qp *create(struct pair *pair, enum ibv_qp_type type, uint64_t operations) {
    struct ibv_qp_init_attr_ex attr = {.send_cq = pair->cq, .recv_cq = pair->cq, .qp_type = type, .cap = {4, 4, 1, 1, 0},
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                       .pd = pair->pd, .send_ops_flags = operations};
    return ibv_create_qp_ex(pair->pd->context, &attr);
}

static void test_built(void) {
    struct pair pair = create_pair(open_first());
    CHECK(!create(&pair, IBV_QPT_UD, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_ATOMIC_WRITE) && errno == EOPNOTSUPP);
    CHECK(!create(&pair, IBV_QPT_RC, IBV_QP_EX_WITH_TSO) && errno == EOPNOTSUPP);
    for (int i = 0; i < 2; i++)
        CHECK(pair.qps[i] = create(&pair, IBV_QPT_RC, IBV_QP_EX_WITH_ATOMIC_WRITE | WITH_FLUSH));
    CHECK(pair.mr = ibv_reg_mr(pair.pd, pair.memory, SIZE, WRITABLE | ACCESS_FLUSH_GLOBAL));
    for (int i = 0; i < 2; i++)
        connect_one(pair.qps[i], pair.qps[!i]->qp_num, pair.gid);
    struct ibv_qp_attr attr = {.qp_access_flags = WRITABLE | ACCESS_FLUSH_GLOBAL};
    CHECK(!ibv_modify_qp(pair.qps[1], &attr, IBV_QP_ACCESS_FLAGS));

    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(pair.qps[0]);
    uint64_t value = 0x0123456789ABCDEF;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_start(ex);
    ibv_wr_atomic_write(ex, pair.mr->rkey, (uintptr_t)pair.memory + 8, &value);
    (*(flush *)(&ex->wr_atomic_write + 1))(ex, pair.mr->rkey, (uintptr_t)pair.memory, SIZE, GLOBAL, 0);
    CHECK(!ibv_wr_complete(ex));
    expect(&pair, pair.qps[0], IBV_WC_SUCCESS);
    expect(&pair, pair.qps[0], IBV_WC_SUCCESS);
    CHECK(!memcmp(pair.memory + 8, &value, sizeof value));
}

/* -- asked ----------------------------------------------------------------------------------------------------------- */

static void test_asked(void) {
    struct pair pair = create_pair(open_first());
    struct ibv_gid_entry entry;
    struct ibv_ece ece = {.vendor_id = 1};
    CHECK(ibv_query_gid_table(pair.pd->context, &entry, 0, 0) == -EINVAL);
    CHECK(ibv_query_ece(pair.qps[0], &ece) == EOPNOTSUPP && ibv_set_ece(pair.qps[0], &ece) == EOPNOTSUPP);
    CHECK(fcntl(pair.pd->context->cmd_fd, F_GETFD) == FD_CLOEXEC);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } tests[] = {
        {"gone", test_gone},   {"unmapped", test_unmapped}, {"changed", test_changed},
        {"built", test_built}, {"asked", test_asked},
    };
    for (size_t i = 0; argc > 1 && i < sizeof tests / sizeof *tests; i++)
        if (!strcmp(argv[1], tests[i].name)) {
            tests[i].run();
            puts("done");
            return 0;
        }
    return 2;
}
