/* librdmacm: event channels and ids.
 *
 * The server has the state of each id, and sends its events, with the uid that the id has here. What the program has
 * not read when an id is destroyed or moves, the server takes back. No uid is used twice.
 */
#include "cm.h"

#include <errno.h>
#include <search.h>
#include <stdlib.h>
#include <unistd.h>

/* Guards targets, acknowledgements, and what channels count. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t acknowledged = PTHREAD_COND_INITIALIZER;
static void *targets; /* a tree of tsearch(3) */
static uint64_t last_uid;

void cm_lock(void) { pthread_mutex_lock(&mutex); }
void cm_unlock(void) { pthread_mutex_unlock(&mutex); }

/* In a child of fork(2) the ids are the parent's. */
static void forget(void) {
    mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    acknowledged = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    targets = NULL;
}

__attribute__((constructor)) static void load(void) { pthread_atfork(NULL, NULL, forget); }

/* -- targets ------------------------------------------------------------------------------------------------------- */

static int compare(const void *one, const void *other) {
    uint64_t a = ((const struct cm_target *)one)->uid, b = ((const struct cm_target *)other)->uid;
    return (a > b) - (a < b);
}

bool cm_target_add(struct cm_target *target) {
    cm_lock();
    target->uid = ++last_uid;
    bool done = tsearch(target, &targets, compare);
    cm_unlock();
    return done;
}

void cm_target_remove(struct cm_target *target) { tdelete(target, &targets, compare); }

struct cm_target *cm_target_find(uint64_t uid) {
    struct cm_target **found = tfind(&(struct cm_target){.uid = uid}, &targets, compare);
    return found ? *found : NULL;
}

void cm_acknowledged(struct cm_target *target) {
    target->unacknowledged--;
    pthread_cond_broadcast(&acknowledged);
}

/* No cancellation point: the caller is in the middle of destroying something. */
void cm_wait_for_acknowledgements(const struct cm_target *target) {
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    while (target->unacknowledged)
        pthread_cond_wait(&acknowledged, &mutex);
    pthread_setcancelstate(state, NULL);
}

/* -- event channels ------------------------------------------------------------------------------------------------ */

/* The server makes the pair of sockets, so that it can take events back. */
static int open_channel(struct cm_channel *channel) {
    struct run_number number;
    struct call call = {.type = RUN_CHANNEL_OPEN, .sent_fd = -1, .out = &number, .out_size = sizeof number};
    int code = control_call(&call);
    if (!code && (call.size < sizeof number || call.fds_count != 1))
        code = EPROTO;
    if (code)
        while (call.fds_count)
            close(call.fds[--call.fds_count]);
    else
        *channel = (struct cm_channel){.channel.fd = call.fds[0], .number = number.number, .references = 1};
    return code;
}

EXPORT struct rdma_event_channel *rdma_create_event_channel(void) {
    struct cm_channel *channel = malloc(sizeof *channel);
    int code = channel ? open_channel(channel) : ENOMEM;
    if (!code)
        return &channel->channel;
    free(channel);
    errno = code == ENOSYS || code == ENOTCONN ? ENODEV : code; /* without a server there is no device */
    return NULL;
}

void cm_channel_release(struct cm_channel *channel) {
    cm_lock();
    bool is_last = !--channel->references;
    cm_unlock();
    if (is_last)
        free(channel);
}

/* A thread that waits for an event keeps the descriptor open: it waits for ever, as with the kernel, and must not meet
 * another file that gets the same number. */
EXPORT void rdma_destroy_event_channel(struct rdma_event_channel *rdma_channel) {
    struct cm_channel *channel = cm_channel_of(rdma_channel);
    cm_lock();
    channel->is_destroyed = true;
    int fd = channel->users ? -1 : channel->channel.fd;
    cm_unlock();
    control(RUN_CHANNEL_CLOSE, channel->number, NULL, 0, NULL, 0);
    if (fd >= 0)
        close(fd);
    cm_channel_release(channel);
}

/* -- requests about ids -------------------------------------------------------------------------------------------- */

int cm_ask(const struct cm_id *id, uint32_t command, const void *in, size_t size, void *out, size_t out_size) {
    int code = control(command, id->channel->number, in, size, out, out_size);
    return code ? fail(code) : 0;
}

int cm_tell(const struct cm_id *id, uint32_t command, const void *in, size_t size) {
    return cm_ask(id, command, in, size, NULL, 0);
}

/* Once the server knows, a thread that gets the event may destroy an id that is not synchronous. */
int cm_do(struct cm_id *id, uint32_t command, const void *in, size_t size) {
    bool waits = id->is_synchronous;
    if (cm_tell(id, command, in, size))
        return -1;
    return waits ? cm_complete(id) : 0;
}

void cm_discard(const struct cm_channel *channel, uint32_t handle) {
    struct rdma_ucm_destroy_id command = {.id = handle};
    struct rdma_ucm_destroy_id_resp reply;
    control(RDMA_USER_CM_CMD_DESTROY_ID, channel->number, &command, sizeof command, &reply, sizeof reply);
}

EXPORT int rdma_set_option(struct rdma_cm_id *rdma_id, int level, int name, void *value, size_t length) {
    struct cm_id *id = cm_id_of(rdma_id);
    if (length > RUN_MOST / 2)
        return fail(EINVAL);
    struct rdma_ucm_set_option command = {
        .id = id->handle, .level = (uint32_t)level, .optname = (uint32_t)name, .optlen = (uint32_t)length};
    struct call call = {.type = RDMA_USER_CM_CMD_SET_OPTION, .channel = id->channel->number, .in = &command,
                        .in_size = sizeof command, .more = value, .more_size = length, .sent_fd = -1};
    int code = control_call(&call);
    return code ? fail(code) : 0;
}

EXPORT int rdma_notify(struct rdma_cm_id *rdma_id, enum ibv_event_type event) {
    struct cm_id *id = cm_id_of(rdma_id);
    struct rdma_ucm_notify command = {.id = id->handle, .event = event};
    return cm_tell(id, RDMA_USER_CM_CMD_NOTIFY, &command, sizeof command);
}

/* -- ids ----------------------------------------------------------------------------------------------------------- */

static void free_id(struct cm_id *id) {
    cm_lock();
    cm_target_remove(&id->target);
    cm_unlock();
    if (id->is_synchronous)
        rdma_destroy_event_channel(&id->channel->channel);
    cm_channel_release(id->channel);
    free(id->id.route.path_rec);
    free(id->attributes);
    free(id->connect_data);
    free(id);
}

/* An id on a channel, which it owns where it is synchronous; NULL with errno. */
static struct cm_id *new_id(struct cm_channel *channel, bool is_synchronous, void *context, enum rdma_port_space ps,
                            enum ibv_qp_type qp_type) {
    struct cm_id *id = malloc(sizeof *id);
    if (!id) {
        errno = ENOMEM;
        return NULL;
    }
    *id = (struct cm_id){
        .id = {.channel = &channel->channel, .context = context, .ps = ps, .qp_type = qp_type},
        .channel = channel, .is_synchronous = is_synchronous};
    if (!cm_target_add(&id->target)) {
        free(id);
        errno = ENOMEM;
        return NULL;
    }
    cm_lock();
    channel->references++;
    cm_unlock();
    return id;
}

static struct cm_id *create(struct rdma_event_channel *given, void *context, enum rdma_port_space ps,
                            enum ibv_qp_type qp_type) {
    struct rdma_event_channel *channel = given ? given : rdma_create_event_channel();
    if (!channel)
        return NULL;
    struct cm_id *id = new_id(cm_channel_of(channel), !given, context, ps, qp_type);
    if (!id) {
        if (!given)
            rdma_destroy_event_channel(channel);
        return NULL;
    }
    struct rdma_ucm_create_id command = {.uid = id->target.uid, .ps = (uint16_t)ps, .qp_type = (uint8_t)qp_type};
    struct rdma_ucm_create_id_resp reply;
    if (cm_ask(id, RDMA_USER_CM_CMD_CREATE_ID, &command, sizeof command, &reply, sizeof reply)) {
        int code = errno;
        free_id(id);
        errno = code;
        return NULL;
    }
    id->handle = reply.id;
    return id;
}

struct cm_id *cm_create(enum rdma_port_space ps, enum ibv_qp_type qp_type) { return create(NULL, NULL, ps, qp_type); }

EXPORT int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context,
                          enum rdma_port_space ps) {
    bool is_datagram = ps == RDMA_PS_UDP || ps == RDMA_PS_IPOIB;
    struct cm_id *made = create(channel, context, ps, is_datagram ? IBV_QPT_UD : IBV_QPT_RC);
    if (!made)
        return -1;
    *id = &made->id;
    return 0;
}

/* Move an id; -1 with errno. Its events come to the other channel then. */
static int move(struct cm_id *id, struct cm_channel *to) {
    struct cm_channel *from = id->channel;
    struct rdma_ucm_migrate_id command = {.id = id->handle, .fd = from->number};
    struct rdma_ucm_migrate_resp reply;
    int code = control(RDMA_USER_CM_CMD_MIGRATE_ID, to->number, &command, sizeof command, &reply, sizeof reply);
    if (code)
        return fail(code);
    cm_lock();
    to->references++;
    id->channel = to;
    id->id.channel = &to->channel;
    cm_unlock();
    cm_channel_release(from);
    return 0;
}

/* A new id of a synchronous listener is synchronous too. */
static int make_synchronous(struct cm_id *id) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel)
        return -1;
    if (!move(id, cm_channel_of(channel))) {
        id->is_synchronous = true;
        return 0;
    }
    int code = errno;
    rdma_destroy_event_channel(channel);
    return fail(code);
}

struct cm_id *cm_adopt(const struct cm_id *listener, uint32_t handle) {
    const struct rdma_cm_id *like = &listener->id;
    struct cm_id *id = new_id(listener->channel, false, like->context, like->ps, like->qp_type);
    if (!id) {
        cm_discard(listener->channel, handle);
        return NULL;
    }
    id->handle = handle;
    if ((!listener->is_synchronous || !make_synchronous(id)) && !cm_query_address(id) && !cm_query_path(id))
        return id;
    cm_discard(id->channel, handle);
    free_id(id);
    return NULL;
}

EXPORT int rdma_migrate_id(struct rdma_cm_id *rdma_id, struct rdma_event_channel *to) {
    struct cm_id *id = cm_id_of(rdma_id);
    struct rdma_event_channel *from = rdma_id->channel;
    bool was_synchronous = id->is_synchronous;
    if (!to && was_synchronous)
        return fail(EINVAL);
    if (to ? move(id, cm_channel_of(to)) : make_synchronous(id))
        return -1;
    if (was_synchronous)
        cm_drop_event(id);
    cm_lock();
    cm_wait_for_acknowledgements(&id->target);
    cm_unlock();
    if (was_synchronous) {
        id->is_synchronous = false;
        rdma_destroy_event_channel(from);
    }
    return 0;
}

EXPORT int rdma_destroy_id(struct rdma_cm_id *rdma_id) {
    struct cm_id *id = cm_id_of(rdma_id);
    cm_discard(id->channel, id->handle); /* where the server has gone, so has the id */
    cm_drop_event(id);
    cm_lock();
    cm_wait_for_acknowledgements(&id->target);
    cm_free_groups(id);
    cm_unlock();
    free_id(id);
    return 0;
}
