/* Completion queues and channels. */
#include "objects.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_CQE = 1 << 22, AT_ONCE = 32 };

/* -- channels ---------------------------------------------------------------------------------------------------------- */

EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
    int ends[2];
    struct channel *channel = calloc(1, sizeof *channel);
    if (!channel || pipe2(ends, O_CLOEXEC)) {
        free(channel);
        return NULL;
    }
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    channel->ibv = (struct ibv_comp_channel){.context = context, .fd = ends[0]};
    channel->report_fd = ends[1];
    return &channel->ibv;
}

EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv) {
    struct channel *channel = (struct channel *)ibv;
    rdmacm_enter();
    bool is_used = ibv->refcnt;
    rdmacm_leave();
    if (is_used)
        return EBUSY;
    close(channel->ibv.fd);
    close(channel->report_fd);
    free(channel);
    return 0;
}

/* A cancellation point, where nothing is held. */
EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context) {
    struct cq *found;
    if (read(channel->fd, &found, sizeof found) != (ssize_t)sizeof found)
        return -1;
    rdmacm_enter();
    found->comp_events++;
    found->waited = true;
    rdmacm_leave();
    *cq = &found->ibv;
    *cq_context = found->ibv.cq_context;
    return 0;
}

EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count) {
    pthread_mutex_lock(&cq->mutex);
    cq->comp_events_completed += count;
    pthread_cond_signal(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
}

static void report(struct cq *cq) {
    cq->armed = NOT_ARMED;
    cq->core.watched = false;
    cq->announced = cq->core.count;
    if (cq->ibv.channel) {
        ssize_t written = write(((struct channel *)cq->ibv.channel)->report_fd, &cq, sizeof cq);
        (void)written; /* a full pipe is readable */
    }
}

void report_completions(struct cq *cq) {
    if (cq->core.overrun && !cq->told_overrun) {
        cq->told_overrun = true;
        report_async(cq->ibv.context, &(struct ibv_async_event){.element.cq = &cq->ibv, .event_type = IBV_EVENT_CQ_ERR});
    }
    if (cq->armed == ARMED || (cq->armed && (cq->core.solicited || cq->core.overrun)))
        report(cq);
}

int verbs_req_notify_cq(struct ibv_cq *ibv, int solicited_only) {
    struct cq *cq = cq_of(ibv);
    rdmacm_enter();
    cq->armed = solicited_only && cq->armed != ARMED ? ARMED_SOLICITED : ARMED;
    cq->core.watched = true;
    cq->core.solicited = false;
    /* Those that came without an event, after a program's last look, are reported now, as adapters of mlx5 do. UCX polls
     * each queue, asks for an event and sleeps; and here a poll of one queue brings completions of the others too. */
    if (cq->armed == ARMED && cq->core.count > cq->announced)
        report(cq);
    rdmacm_leave();
    return 0;
}

/* -- queues ------------------------------------------------------------------------------------------------------------ */

static struct cq *create(struct ibv_context *context, unsigned cqe, void *cq_context, struct ibv_comp_channel *channel,
                         unsigned vector) {
    bool is_right = cqe && cqe <= MOST_CQE && vector < (unsigned)context->num_comp_vectors;
    struct cq *cq = is_right ? calloc(1, sizeof *cq) : NULL;
    if (!cq) {
        errno = is_right ? ENOMEM : EINVAL;
        return NULL;
    }
    if (!process_wire()) {
        free(cq);
        return NULL;
    }
    cq->ibv.context = context;
    cq->ibv.channel = channel;
    cq->ibv.cq_context = cq_context;
    cq->ibv.cqe = (int)cqe;
    pthread_mutex_init(&cq->ibv.mutex, NULL);
    pthread_cond_init(&cq->ibv.cond, NULL);
    cq->core.limit = cqe;
    cq->core.owner = cq;
    rdmacm_enter();
    if (channel)
        channel->refcnt++;
    rdmacm_leave();
    return cq;
}

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
                                    struct ibv_comp_channel *channel, int vector) {
    struct cq *cq = create(context, cqe < 0 ? 0 : (unsigned)cqe, cq_context, channel, (unsigned)vector);
    return cq ? &cq->ibv : NULL;
}

EXPORT int ibv_resize_cq(struct ibv_cq *ibv, int cqe) {
    struct cq *cq = cq_of(ibv);
    rdmacm_enter();
    bool is_right = cqe > 0 && cqe <= MOST_CQE && cq->core.count <= (size_t)cqe;
    if (is_right) {
        cq->core.limit = (size_t)cqe;
        cq->ibv.cqe = cqe;
    }
    rdmacm_leave();
    return is_right ? 0 : EINVAL;
}

/* Wait until the program has acknowledged the events that it has fetched. */
static void wait_for_acks(struct cq *cq) {
    pthread_mutex_lock(&cq->ibv.mutex);
    while (cq->ibv.comp_events_completed < cq->comp_events)
        pthread_cond_wait(&cq->ibv.cond, &cq->ibv.mutex);
    pthread_mutex_unlock(&cq->ibv.mutex);
}

/* Take the events of a queue that nobody has fetched out of its channel. With the mutex. */
static void drop_events(struct cq *cq) {
    struct channel *channel = (struct channel *)cq->ibv.channel;
    struct cq *others[AT_ONCE], *found;
    size_t count = 0;
    int flags = fcntl(channel->ibv.fd, F_GETFL);
    fcntl(channel->ibv.fd, F_SETFL, flags | O_NONBLOCK);
    while (count < AT_ONCE && read(channel->ibv.fd, &found, sizeof found) == (ssize_t)sizeof found)
        if (found != cq)
            others[count++] = found;
    fcntl(channel->ibv.fd, F_SETFL, flags);
    for (size_t i = 0; i < count; i++) {
        ssize_t written = write(channel->report_fd, &others[i], sizeof others[i]);
        (void)written;
    }
}

static void drop_entries(struct cq *cq, const uint32_t *qp_num) {
    struct rdmacm_entry entries[AT_ONCE];
    size_t count;
    do {
        count = qp_num ? rdmacm_cq_remove(&cq->core, *qp_num, entries, AT_ONCE)
                       : rdmacm_cq_take(&cq->core, entries, AT_ONCE);
        for (size_t i = 0; i < count; i++)
            pin_free(entries[i].completion.pin);
    } while (count == AT_ONCE);
    if (cq->announced > cq->core.count)
        cq->announced = cq->core.count;
}

void cq_drop(struct cq *cq, uint32_t qp_num) { drop_entries(cq, &qp_num); }

EXPORT int ibv_destroy_cq(struct ibv_cq *ibv) {
    struct cq *cq = cq_of(ibv);
    struct rdmacm_wire *wire = process_wire();
    rdmacm_enter();
    bool is_used = cq->uses;
    if (!is_used) {
        if (wire)
            RDMACM_UNLIST(wire->added, &cq->core, next_added, is_listed);
        drop_entries(cq, NULL);
        rdmacm_cq_free(&cq->core);
        if (ibv->channel) {
            drop_events(cq);
            ibv->channel->refcnt--;
        }
    }
    rdmacm_leave();
    if (is_used)
        return EBUSY;
    wait_for_acks(cq);
    free(cq);
    return 0;
}

/* -- completions ------------------------------------------------------------------------------------------------------- */

static const enum ibv_wc_opcode opcodes[] = {
    [IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE,
    [IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
    [IBV_WR_SEND] = IBV_WC_SEND,
    [IBV_WR_SEND_WITH_IMM] = IBV_WC_SEND,
    [IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
    [IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP,
    [IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD,
    [IBV_WR_LOCAL_INV] = IBV_WC_LOCAL_INV,
    [IBV_WR_BIND_MW] = IBV_WC_BIND_MW,
    [IBV_WR_SEND_WITH_INV] = IBV_WC_SEND,
    [IBV_WR_FLUSH] = IBV_WC_FLUSH,
    [RDMACM_WR_ATOMIC_WRITE] = 9, /* IBV_WC_ATOMIC_WRITE */
};

static enum ibv_wc_opcode opcode_of(const struct rdmacm_completion *completion) {
    if (!completion->is_recv)
        return opcodes[completion->opcode];
    return completion->opcode == RDMACM_WR_WRITE_WITH_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
}

static unsigned int flags_of(const struct rdmacm_completion *completion) {
    return (completion->word_kind == RDMACM_IMMEDIATE ? IBV_WC_WITH_IMM : 0u) |
           (completion->word_kind == RDMACM_INVALIDATED ? IBV_WC_WITH_INV : 0u) |
           (completion->is_datagram ? IBV_WC_GRH : 0u);
}

/* What kind of packet a datagram came in. struct ibv_wc has no field for it and RoCE no service level, so adapters of
 * mlx5 put it there: bit 3 for UDP, and the type of the layer 3 header, 1 for IPv6 and 2 for IPv4. UCX relies on that. */
static uint8_t sl_of(const struct rdmacm_completion *completion) {
    if (!completion->is_datagram)
        return 0;
    return 8 | (completion->is_ipv6 ? 1 : 2);
}

static void fill(struct ibv_wc *wc, const struct rdmacm_entry *entry) {
    const struct rdmacm_completion *completion = &entry->completion;
    const struct pin *pin = completion->pin;
    *wc = (struct ibv_wc){.wr_id = pin->wr_id, .status = completion->status, .opcode = opcode_of(completion),
                          .byte_len = completion->byte_len, .qp_num = entry->qp_num, .src_qp = completion->src_qp,
                          .wc_flags = flags_of(completion), .sl = sl_of(completion)};
    if (completion->word_kind == RDMACM_IMMEDIATE)
        wc->imm_data = htonl(completion->word);
    else
        wc->invalidated_rkey = completion->word;
}

/* Take completions out, after progress if there are none; how many. */
static size_t take(struct cq *cq, struct rdmacm_entry *entries, size_t most) {
    struct rdmacm_wire *wire = process_wire();
    bool is_idle = false;
    if (!wire)
        return 0;
    rdmacm_enter();
    if (!cq->core.count)
        is_idle = !process_poll(wire, &cq->core);
    else if (wire->acks && !cq->waited)
        rdmacm_wire_acknowledge(wire, rdmacm_now());
    cq->waited = false;
    size_t count = rdmacm_cq_take(&cq->core, entries, most);
    cq->announced -= count < cq->announced ? count : cq->announced;
    process_settle(wire);
    rdmacm_leave();
    if (is_idle)
        rdmacm_wire_yield(wire);
    for (size_t i = 0; i < count; i++)
        if (entries[i].completion.status == RDMACM_WC_RETRY_EXC_ERR)
            qp_tell_hole(entries[i].qp_num);
    return count;
}

int verbs_poll_cq(struct ibv_cq *ibv, int most, struct ibv_wc *wc) {
    struct cq *cq = cq_of(ibv);
    struct rdmacm_entry entries[AT_ONCE];
    int found = 0;
    while (found < most) {
        size_t wanted = (size_t)(most - found) < AT_ONCE ? (size_t)(most - found) : AT_ONCE;
        if (found && !rdmacm_cq_has_any(&cq->core))
            break;
        size_t count = take(cq, entries, wanted);
        for (size_t i = 0; i < count; i++) {
            fill(&wc[found++], &entries[i]);
            pin_free(entries[i].completion.pin);
        }
        if (count < wanted)
            break;
    }
    return !found && most > 0 && cq->core.overrun ? -1 : found;
}

/* -- extended queues: completions one by one --------------------------------------------------------------------------- */

static int show(struct cq *cq) {
    if (cq->current.completion.pin)
        pin_free(cq->current.completion.pin);
    if (!take(cq, &cq->current, 1)) {
        cq->current = (struct rdmacm_entry){0};
        return ENOENT;
    }
    cq->ex.wr_id = ((const struct pin *)cq->current.completion.pin)->wr_id;
    cq->ex.status = cq->current.completion.status;
    return 0;
}

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr) {
    return attr && attr->comp_mask ? EINVAL : show((struct cq *)ex);
}

static int next_poll(struct ibv_cq_ex *ex) {
    struct cq *cq = (struct cq *)ex;
    if (!rdmacm_cq_has_any(&cq->core)) /* end_poll() still needs the last one */
        return ENOENT;
    return show(cq);
}

static void end_poll(struct ibv_cq_ex *ex) {
    struct cq *cq = (struct cq *)ex;
    if (cq->current.completion.pin)
        pin_free(cq->current.completion.pin);
    cq->current = (struct rdmacm_entry){0};
}

static const struct rdmacm_completion *current(struct ibv_cq_ex *ex) { return &((struct cq *)ex)->current.completion; }

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *ex) { return opcode_of(current(ex)); }
static uint32_t read_zero(struct ibv_cq_ex *ex) { return (void)ex, 0; }
static uint8_t read_sl(struct ibv_cq_ex *ex) { return sl_of(current(ex)); }
static uint8_t read_zero8(struct ibv_cq_ex *ex) { return (void)ex, 0; }
static uint16_t read_zero16(struct ibv_cq_ex *ex) { return (void)ex, 0; }
static uint32_t read_byte_len(struct ibv_cq_ex *ex) { return current(ex)->byte_len; }
static __be32 read_imm_data(struct ibv_cq_ex *ex) {
    return current(ex)->word_kind == RDMACM_IMMEDIATE ? htonl(current(ex)->word) : current(ex)->word;
}
static uint32_t read_qp_num(struct ibv_cq_ex *ex) { return ((struct cq *)ex)->current.qp_num; }
static uint32_t read_src_qp(struct ibv_cq_ex *ex) { return current(ex)->src_qp; }
static unsigned int read_wc_flags(struct ibv_cq_ex *ex) { return flags_of(current(ex)); }

struct ibv_cq_ex *verbs_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr) {
    const uint64_t known = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM |
                           IBV_WC_EX_WITH_SRC_QP | IBV_WC_EX_WITH_SLID | IBV_WC_EX_WITH_SL |
                           IBV_WC_EX_WITH_DLID_PATH_BITS;
    if (attr->wc_flags & ~known || attr->comp_mask & ~(uint32_t)IBV_CQ_INIT_ATTR_MASK_FLAGS ||
        (attr->comp_mask && attr->flags & ~(uint32_t)(IBV_CREATE_CQ_ATTR_SINGLE_THREADED))) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    struct cq *cq = create(context, attr->cqe, attr->cq_context, attr->channel, attr->comp_vector);
    if (!cq)
        return NULL;
    cq->ex.start_poll = start_poll;
    cq->ex.next_poll = next_poll;
    cq->ex.end_poll = end_poll;
    cq->ex.read_opcode = read_opcode;
    cq->ex.read_vendor_err = read_zero;
    cq->ex.read_byte_len = read_byte_len;
    cq->ex.read_imm_data = read_imm_data;
    cq->ex.read_qp_num = read_qp_num;
    cq->ex.read_src_qp = read_src_qp;
    cq->ex.read_wc_flags = read_wc_flags;
    cq->ex.read_slid = read_zero;
    cq->ex.read_sl = read_sl;
    cq->ex.read_dlid_path_bits = read_zero8;
    cq->ex.read_cvlan = read_zero16;
    cq->ex.read_flow_tag = read_zero;
    return &cq->ex;
}
