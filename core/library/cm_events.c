/* librdmacm: events of connections, and what is done at each before the program sees it. */
#include "cm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* -- the socket of a channel --------------------------------------------------------------------------------------- */

/* A channel that is in use is not freed, and its descriptor stays open. */
static void begin_use(struct cm_channel *channel) {
    cm_lock();
    channel->users++;
    channel->references++;
    cm_unlock();
}

static void end_use(void *argument) {
    struct cm_channel *channel = argument;
    cm_lock();
    int fd = --channel->users || !channel->is_destroyed ? -1 : channel->channel.fd;
    cm_unlock();
    if (fd >= 0)
        close(fd);
    cm_channel_release(channel);
}

/* Wait until there is a packet, as the descriptor is blocking or not; 0 or an errno. A cancellation point, without a
 * lock; what it sees may go to another thread, or back to the server. */
static int wait_for_packet(const struct cm_channel *channel) {
    uint8_t byte;
    ssize_t size = recv(channel->channel.fd, &byte, 1, MSG_PEEK);
    if (size > 0)
        return 0;
    int code = size < 0 ? errno : ENODEV; /* the server has gone */
    cm_lock();
    bool is_destroyed = channel->is_destroyed;
    cm_unlock();
    while (is_destroyed) /* nothing comes any more: as with the kernel, the caller waits until it is cancelled */
        pause();
    return code;
}

/* What a target is of. */
static struct cm_id *id_of(struct cm_target *target) {
    return target->is_group ? ((struct cm_group *)target)->id
                            : (struct cm_id *)((char *)target - offsetof(struct cm_id, target));
}

/* Receive an event, and count it for what it is about, which is returned; NULL: there is none any more, or none that
 * the program awaits. */
static struct cm_target *take(const struct cm_channel *channel, struct rdma_ucm_event_resp *packet) {
    struct cm_target *target = NULL;
    cm_lock();
    if (recv(channel->channel.fd, packet, sizeof *packet, MSG_DONTWAIT) > 0)
        target = cm_target_find(packet->uid);
    if (target) {
        id_of(target)->target.unacknowledged++;
        if (target->is_group)
            target->unacknowledged++;
    }
    cm_unlock();
    return target;
}

/* -- what is done at an event -------------------------------------------------------------------------------------- */

static void copy_private_data(struct cm_event *event, const uint8_t *data, uint8_t length, const void **to,
                              uint8_t *size) {
    memcpy(event->private_data, data, length);
    *to = length ? event->private_data : NULL;
    *size = length;
}

static void copy_connection(struct cm_event *event, const struct rdma_ucm_conn_param *from) {
    struct rdma_conn_param *to = &event->event.param.conn;
    *to = (struct rdma_conn_param){
        .responder_resources = from->responder_resources, .initiator_depth = from->initiator_depth,
        .flow_control = from->flow_control, .retry_count = from->retry_count, .rnr_retry_count = from->rnr_retry_count,
        .srq = from->srq, .qp_num = from->qp_num};
    copy_private_data(event, from->private_data, from->private_data_len, &to->private_data, &to->private_data_len);
}

static void copy_datagram(struct cm_event *event, const struct rdma_ucm_ud_param *from) {
    struct rdma_ud_param *to = &event->event.param.ud;
    *to = (struct rdma_ud_param){.qp_num = from->qp_num, .qkey = from->qkey};
    cm_copy_ah_attr(&to->ah_attr, &from->ah_attr);
    copy_private_data(event, from->private_data, from->private_data_len, &to->private_data, &to->private_data_len);
}

static void copy_parameters(struct cm_event *event, const struct rdma_ucm_event_resp *packet) {
    if (cm_is_datagram(&event->id->id))
        copy_datagram(event, &packet->param.ud);
    else
        copy_connection(event, &packet->param.conn);
}

/* Make the event one of an error, if `result` says so. */
static void turn(struct cm_event *event, enum rdma_cm_event_type type, int result) {
    if (!result)
        return;
    event->event.event = type;
    event->event.status = -errno;
}

static void keep_ece(struct cm_id *id, const struct rdma_ucm_ece *ece) {
    id->remote_ece = (struct ibv_ece){.vendor_id = ece->vendor_id, .options = ece->attr_mod};
}

static bool take_request(struct cm_event *event, const struct rdma_ucm_event_resp *packet) {
    copy_parameters(event, packet);
    struct cm_id *id = cm_adopt(event->id, packet->id);
    if (!id)
        return false;
    if (!cm_is_datagram(&id->id)) {
        id->responder_resources = packet->param.conn.responder_resources;
        id->initiator_depth = packet->param.conn.initiator_depth;
    }
    keep_ece(id, &packet->ece);
    event->event.listen_id = &event->id->id;
    event->event.id = &id->id;
    return true;
}

static void take_response(struct cm_event *event, const struct rdma_ucm_event_resp *packet) {
    struct cm_id *id = event->id;
    copy_parameters(event, packet);
    keep_ece(id, &packet->ece);
    if (!id->id.qp)
        return;
    event->event.event = RDMA_CM_EVENT_ESTABLISHED;
    turn(event, RDMA_CM_EVENT_CONNECT_ERROR, cm_finish_connect(id));
    id->has_failed = event->event.event == RDMA_CM_EVENT_CONNECT_ERROR;
}

static void take_join(struct cm_event *event, const struct rdma_ucm_event_resp *packet) {
    copy_datagram(event, &packet->param.ud);
    event->event.param.ud.private_data = event->group->context;
    if (packet->event == RDMA_CM_EVENT_MULTICAST_JOIN)
        turn(event, RDMA_CM_EVENT_MULTICAST_ERROR, cm_finish_join(event->group, &event->event.param.ud));
}

/* False: the program sees nothing of it. */
static bool process(struct cm_event *event, const struct rdma_ucm_event_resp *packet) {
    struct cm_id *id = event->id;
    event->event.id = &id->id;
    event->event.event = packet->event;
    event->event.status = (int)packet->status;
    switch (packet->event) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
        turn(event, RDMA_CM_EVENT_ADDR_ERROR, cm_query_address(id));
        break;
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
        turn(event, RDMA_CM_EVENT_ROUTE_ERROR, cm_query_path(id));
        break;
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        return take_request(event, packet);
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
        take_response(event, packet);
        break;
    case RDMA_CM_EVENT_REJECTED:
        copy_parameters(event, packet);
        cm_fail_queue_pair(id);
        return !id->has_failed;
    case RDMA_CM_EVENT_DISCONNECTED:
        copy_parameters(event, packet);
        return !id->has_failed;
    case RDMA_CM_EVENT_MULTICAST_JOIN:
    case RDMA_CM_EVENT_MULTICAST_ERROR:
        if (!event->group)
            return false;
        take_join(event, packet);
        break;
    default:
        copy_parameters(event, packet);
    }
    return true;
}

/* -- get and acknowledge ------------------------------------------------------------------------------------------- */

static void acknowledge(struct cm_event *event) {
    cm_lock();
    if (event->group)
        cm_acknowledged(&event->group->target);
    cm_acknowledged(&event->id->target);
    cm_unlock();
    free(event);
}

/* 0, an errno, or -1: it was no event for the program. */
static int get(const struct cm_channel *channel, struct rdma_cm_event **result) {
    struct rdma_ucm_event_resp packet = {0};
    struct cm_event *event = calloc(1, sizeof *event);
    if (!event)
        return ENOMEM;
    struct cm_target *target = take(channel, &packet);
    if (!target) {
        free(event);
        return -1;
    }
    event->id = id_of(target);
    event->group = target->is_group ? (struct cm_group *)target : NULL;
    if (!process(event, &packet)) {
        acknowledge(event);
        return -1;
    }
    *result = &event->event;
    return 0;
}

static int wait_and_get(const struct cm_channel *channel, struct rdma_cm_event **event) {
    for (;;) {
        int code = wait_for_packet(channel), state;
        if (code)
            return code;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); /* no event is lost */
        code = get(channel, event);
        pthread_setcancelstate(state, NULL);
        if (code >= 0)
            return code;
    }
}

EXPORT int rdma_get_cm_event(struct rdma_event_channel *rdma_channel, struct rdma_cm_event **event) {
    struct cm_channel *channel = cm_channel_of(rdma_channel);
    int code;
    if (!channel || !event)
        return fail(EINVAL);
    begin_use(channel);
    pthread_cleanup_push(end_use, channel);
    code = wait_and_get(channel, event);
    pthread_cleanup_pop(1);
    return code ? fail(code) : 0;
}

EXPORT int rdma_ack_cm_event(struct rdma_cm_event *event) {
    if (!event)
        return fail(EINVAL);
    acknowledge((struct cm_event *)event);
    return 0;
}

/* -- synchronous ids ----------------------------------------------------------------------------------------------- */

void cm_drop_event(struct cm_id *id) {
    if (id->id.event)
        rdma_ack_cm_event(id->id.event);
    id->id.event = NULL;
}

int cm_complete(struct cm_id *id) {
    cm_drop_event(id);
    if (rdma_get_cm_event(id->id.channel, &id->id.event))
        return -1;
    int status = id->id.event->status;
    if (!status)
        return 0;
    return fail(id->id.event->event == RDMA_CM_EVENT_REJECTED ? ECONNREFUSED : status < 0 ? -status : status);
}
