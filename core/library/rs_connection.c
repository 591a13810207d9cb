/* rsocket(7): a connection, its queue pair and memory around the engine of the protocol. All with the socket's lock. */
#include "rs_datagram.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    AT_ONCE = 32, /* completions */
    MOST_RETRIES = 7,
    LEAST_INLINE = RS_TARGET_LENGTH,
};
enum { SEND = 1, RECEIVE = 2 }; /* wr_id */

/* -- memory -------------------------------------------------------------------------------------------------------- */

static size_t control_size(const struct rs_socket *rs) {
    return RS_TARGETS * RS_TARGET_LENGTH + (size_t)rs->options.mappings * RS_MAPPING_LENGTH;
}

/* The rings begin at multiples of a cache line. */
static size_t rounded(size_t size) { return (size + 63) & ~(size_t)63; }

static int open_memory(struct rs_socket *rs) {
    size_t control = rounded(control_size(rs)), receiving = (size_t)rs->options.receive_buffer;
    size_t sending = (size_t)rs->options.send_buffer;
    const int by_peer = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    rs->memory_size = control + rounded(receiving) + sending;
    void *memory = mmap(NULL, rs->memory_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return -1;
    rs->memory = memory;
    rs->stream.control = rs->memory;
    rs->stream.receiving = rs->memory + control;
    rs->stream.sending = rs->stream.receiving + rounded(receiving);
    rs->stream.receive_size = receiving;
    rs->stream.send_size = sending;
    rs->control = ibv_reg_mr(rs->pd, rs->stream.control, control_size(rs), by_peer);
    rs->receiving = ibv_reg_mr(rs->pd, rs->stream.receiving, receiving, by_peer);
    rs->sending = ibv_reg_mr(rs->pd, rs->stream.sending, sending, 0);
    if (!rs->control || !rs->receiving || !rs->sending)
        return -1;
    rs->stream.own = (struct rs_connection_data){
        .version = RS_VERSION, .flags = rs_own_flags(), .credits = (uint16_t)rs->options.receive_queue,
        .mappings = (uint32_t)rs->options.mappings,
        .control = {(uintptr_t)rs->stream.control, rs->control->rkey, RS_TARGETS},
        .buffer = {(uintptr_t)rs->stream.receiving, rs->receiving->rkey, (uint32_t)(receiving / 2)}};
    return 0;
}

/* -- receives and requests ------------------------------------------------------------------------------------------ */

static void post_receives(struct rs_socket *rs, int count) {
    struct ibv_recv_wr requests[AT_ONCE], *bad;
    for (int i = 0; i < count; i++)
        requests[i] = (struct ibv_recv_wr){.wr_id = RECEIVE, .next = i + 1 < count ? &requests[i + 1] : NULL};
    if (count && verbs_post_recv(rs->id->qp, requests, &bad))
        rs_end(rs);
}

/* Post what the engine wants. */
static void post(void *owner, const struct rs_work *work) {
    struct rs_socket *rs = owner;
    struct ibv_sge pieces[2];
    struct ibv_send_wr request = {.wr_id = SEND, .sg_list = pieces, .num_sge = work->count, .send_flags = IBV_SEND_SIGNALED,
                                  .opcode = work->has_immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE,
                                  .imm_data = htonl(work->immediate)};
    struct ibv_send_wr *bad;
    if (rs->is_gone)
        return;
    request.wr.rdma.remote_addr = work->remote;
    request.wr.rdma.rkey = work->key;
    for (int i = 0; i < work->count; i++)
        pieces[i] = (struct ibv_sge){.addr = (uintptr_t)work->pieces[i].start, .lkey = rs->sending->lkey,
                                     .length = (uint32_t)work->pieces[i].length};
    if (work->inlined_length) {
        pieces[0] = (struct ibv_sge){.addr = (uintptr_t)work->inlined, .length = (uint32_t)work->inlined_length};
        request.num_sge = 1;
        request.send_flags |= IBV_SEND_INLINE;
    }
    if (verbs_post_send(rs->id->qp, &request, &bad))
        rs_end(rs);
}

/* -- the queue pair -------------------------------------------------------------------------------------------------- */

/* The options that the device has room for. */
static int fit(struct rs_socket *rs) {
    struct ibv_device_attr device;
    int code = ibv_query_device(rs->id->verbs, &device);
    if (code)
        return fail(code);
    int most = device.max_qp_wr < device.max_cqe / 2 ? device.max_qp_wr : device.max_cqe / 2;
    if (rs->options.send_queue > most)
        rs->options.send_queue = most;
    if (rs->options.receive_queue > most)
        rs->options.receive_queue = most;
    return 0;
}

static int create_queue_pair(struct rs_socket *rs) {
    int inlined = rs->options.inlined > LEAST_INLINE ? rs->options.inlined : LEAST_INLINE;
    struct ibv_qp_init_attr attributes = {
        .send_cq = rs->cq, .recv_cq = rs->cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
        .cap = {.max_send_wr = (uint32_t)rs->options.send_queue, .max_recv_wr = (uint32_t)rs->options.receive_queue,
                .max_send_sge = 2, .max_recv_sge = 1, .max_inline_data = (uint32_t)inlined}};
    if (!rdma_create_qp(rs->id, rs->pd, &attributes))
        return 0;
    attributes.cap.max_inline_data = LEAST_INLINE; /* the device has less than was asked for */
    return errno == EINVAL ? rdma_create_qp(rs->id, rs->pd, &attributes) : -1;
}

/* Make the queue pair, and post all receives; -1 with errno. */
static int open_connection(struct rs_socket *rs) {
    if (fit(rs))
        return -1;
    int size = rs->options.send_queue + rs->options.receive_queue;
    if (!(rs->pd = ibv_alloc_pd(rs->id->verbs)) || !(rs->comp_channel = ibv_create_comp_channel(rs->id->verbs)) ||
        !(rs->cq = ibv_create_cq(rs->id->verbs, size, rs, rs->comp_channel, 0)))
        return -1;
    fcntl(rs->comp_channel->fd, F_SETFL, O_NONBLOCK);
    if (create_queue_pair(rs) || open_memory(rs))
        return -1;
    for (int left = rs->options.receive_queue; left > 0; left -= AT_ONCE)
        post_receives(rs, left < AT_ONCE ? left : AT_ONCE);
    return rs->is_gone ? fail(ECONNABORTED) : 0;
}

/* The peer's connection data have arrived. */
static int begin_stream(struct rs_socket *rs, const struct rs_connection_data *peer) {
    rs->stream.peer = *peer;
    rs->stream.post = post;
    rs->stream.owner = rs;
    rs->phase = RS_HAS_STREAM;
    return rs_stream_init(&rs->stream, (uint32_t)rs->options.send_queue) ? 0 : fail(ENOMEM);
}

/* What both ends send; `data` has room for the private data. */
static struct rdma_conn_param parameters_of(const struct rs_socket *rs, uint8_t *data) {
    rs_pack_connection(data, &rs->stream.own);
    return (struct rdma_conn_param){.private_data = data, .private_data_len = RS_CONNECTION_LENGTH, .flow_control = 1,
                                    .retry_count = MOST_RETRIES, .rnr_retry_count = MOST_RETRIES};
}

/* -- the end --------------------------------------------------------------------------------------------------------- */

void rs_end(struct rs_socket *rs) {
    if (rs->is_gone)
        return;
    rs->is_gone = true;
    if (rs->phase == RS_HAS_STREAM)
        rs_stream_change(&rs->stream, RS_LOST);
    if (rs->id && rs->id->qp)
        rdma_disconnect(rs->id);
    rs_wake();
    rs_tell(rs, true);
}

/* It could not be made. */
static void refuse(struct rs_socket *rs, int error) {
    rs->error = error;
    if (rs->phase == RS_CONNECTING)
        rs->phase = RS_ENDED;
    rs_end(rs);
}

static void close_region(struct ibv_mr *mr) {
    if (mr)
        ibv_dereg_mr(mr);
}

void rs_destroy(struct rs_socket *rs) {
    rs_datagram_free(rs);
    if (rs->id && rs->id->qp)
        rdma_destroy_qp(rs->id);
    while (rs->mapped) {
        struct rs_mapped *mapped = rs->mapped;
        rs->mapped = mapped->next;
        close_region(mapped->mr);
        free(mapped);
    }
    close_region(rs->control);
    close_region(rs->receiving);
    close_region(rs->sending);
    if (rs->cq)
        ibv_destroy_cq(rs->cq);
    if (rs->comp_channel)
        ibv_destroy_comp_channel(rs->comp_channel);
    if (rs->pd)
        ibv_dealloc_pd(rs->pd);
    if (rs->memory)
        munmap(rs->memory, rs->memory_size);
    if (rs->id)
        rdma_destroy_id(rs->id);
    rdma_destroy_event_channel(rs->channel);
    rs_stream_free(&rs->stream);
}

/* -- completions ----------------------------------------------------------------------------------------------------- */

static void establish(struct rs_socket *rs) {
    if (rs->is_established)
        return;
    rs->is_established = true;
    rs->last_heard = rdmacm_now();
    rs_stream_start(&rs->stream);
}

static void take(struct rs_socket *rs, const struct ibv_wc *wc) {
    if (wc->status != IBV_WC_SUCCESS) {
        rs_end(rs);
        return;
    }
    if (!(wc->opcode & IBV_WC_RECV)) {
        rs_stream_completed(&rs->stream);
        return;
    }
    if (!rs->is_established) { /* data imply the message that has been lost, or comes later */
        rdma_notify(rs->id, IBV_EVENT_COMM_EST);
        establish(rs);
    }
    if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM)
        rs_stream_received(&rs->stream, ntohl(wc->imm_data));
    else
        rs_stream_broken(&rs->stream, RS_UNKNOWN_OPERATION);
}

static bool take_completions(struct rs_socket *rs) {
    struct ibv_wc completions[AT_ONCE];
    int receives = 0, count = verbs_poll_cq(rs->cq, AT_ONCE, completions);
    if (count < 0)
        rs_end(rs);
    for (int i = 0; i < count; i++)
        receives += completions[i].status == IBV_WC_SUCCESS && completions[i].opcode & IBV_WC_RECV;
    if (receives) { /* before the peer gets credits for them */
        rs->last_heard = rdmacm_now();
        if (!rs->is_gone)
            post_receives(rs, receives);
    }
    for (int i = 0; i < count; i++)
        take(rs, &completions[i]);
    if (rs->stream.fault)
        rs_end(rs);
    return count;
}

/* -- events ---------------------------------------------------------------------------------------------------------- */

static void take_response(struct rs_socket *rs, const struct rdma_conn_param *param) {
    struct rs_connection_data peer;
    if (rs->phase == RS_HAS_STREAM)
        establish(rs);
    if (rs->phase != RS_CONNECTING)
        return;
    if (!rs_unpack_connection(param->private_data, param->private_data_len, &peer))
        refuse(rs, ENOTSUP);
    else if (begin_stream(rs, &peer))
        refuse(rs, errno);
    else
        establish(rs);
}

static void connect_now(struct rs_socket *rs) {
    uint8_t data[RS_CONNECTION_LENGTH];
    if (open_connection(rs)) {
        refuse(rs, errno);
        return;
    }
    struct rdma_conn_param parameters = parameters_of(rs, data);
    if (rdma_connect(rs->id, &parameters))
        refuse(rs, errno);
}

static int resolve_route(struct rs_socket *rs) {
    return rs->route ? rdma_set_option(rs->id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, rs->route, rs->route_size)
                     : rdma_resolve_route(rs->id, RS_RESOLVE_TIMEOUT);
}

static int error_of(const struct rdma_cm_event *event) {
    switch (event->event) {
    case RDMA_CM_EVENT_REJECTED: return ECONNREFUSED;
    case RDMA_CM_EVENT_UNREACHABLE: return event->status == -ETIMEDOUT ? ETIMEDOUT : EHOSTUNREACH;
    default: return event->status < 0 ? -event->status : ECONNRESET;
    }
}

static void take_event(struct rs_socket *rs, const struct rdma_cm_event *event) {
    switch (event->event) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
        if (resolve_route(rs))
            refuse(rs, errno);
        break;
    case RDMA_CM_EVENT_ROUTE_RESOLVED: connect_now(rs); break;
    case RDMA_CM_EVENT_ESTABLISHED: take_response(rs, &event->param.conn); break;
    case RDMA_CM_EVENT_DISCONNECTED:
        while (rs->cq && take_completions(rs)) { /* what came before it */
        }
        rs_end(rs);
        break;
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
    case RDMA_CM_EVENT_CONNECT_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_REJECTED:
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
        if (!rs->is_established)
            refuse(rs, error_of(event));
        else if (event->event != RDMA_CM_EVENT_UNREACHABLE)
            rs_end(rs);
        break;
    default: break;
    }
}

static bool take_events(struct rs_socket *rs) {
    struct rdma_cm_event *event;
    bool has_any = false;
    while (!rdma_get_cm_event(rs->channel, &event)) {
        take_event(rs, event);
        rdma_ack_cm_event(event);
        has_any = true;
    }
    if (errno != EAGAIN && !rs->is_gone) { /* the server has gone */
        refuse(rs, ENODEV);
        has_any = true;
    }
    return has_any;
}

bool rs_progress(struct rs_socket *rs) {
    if (rs->phase == RS_LISTENING || rs->phase == RS_IDLE)
        return false;
    if (rs->phase == RS_HAS_STREAM && take_completions(rs))
        return true;
    return take_events(rs);
}

/* -- the passive side ------------------------------------------------------------------------------------------------ */

bool rs_has_request(const struct rs_socket *rs) {
    struct pollfd readable = {.fd = rs->fd, .events = POLLIN};
    return poll(&readable, 1, 0) > 0;
}

static void refuse_request(struct rdma_cm_id *id) {
    rdma_reject(id, NULL, 0);
    rdma_destroy_id(id);
}

static struct rs_socket *accept_request(struct rs_socket *listener, struct rdma_cm_id *id,
                                        const struct rs_connection_data *peer) {
    uint8_t data[RS_CONNECTION_LENGTH];
    struct rs_socket *rs = rs_new(listener->domain);
    if (!rs || rdma_migrate_id(id, rs->channel)) {
        if (rs)
            rs_release(rs);
        refuse_request(id);
        return NULL;
    }
    rs->options = listener->options;
    rs->id = id;
    rs->is_bound = true;
    if (!open_connection(rs) && !begin_stream(rs, peer)) {
        struct rdma_conn_param parameters = parameters_of(rs, data);
        if (!rdma_accept(id, &parameters) && !rs_add(rs))
            return rs;
    }
    rdma_reject(id, NULL, 0);
    rs_release(rs);
    return NULL;
}

struct rs_socket *rs_accept(struct rs_socket *listener, int *code) {
    struct rdma_cm_event *event = NULL;
    struct rs_connection_data peer;
    *code = rdma_get_cm_event(listener->channel, &event) && errno != EAGAIN ? errno : 0;
    if (!event)
        return NULL;
    bool is_request = event->event == RDMA_CM_EVENT_CONNECT_REQUEST;
    struct rdma_cm_id *id = event->id;
    bool is_right = is_request && rs_unpack_connection(event->param.conn.private_data,
                                                       event->param.conn.private_data_len, &peer);
    rdma_ack_cm_event(event);
    if (is_request && !is_right)
        refuse_request(id);
    return is_right ? accept_request(listener, id, &peer) : NULL;
}
