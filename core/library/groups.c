/* Multicast groups of datagram queue pairs. */
#include "objects.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

/* A group's socket; -1 with errno. */
static int ask_socket(struct ibv_context *context, const union ibv_gid *gid) {
    struct run_group body = {.ifindex = context_of(context)->device->info.ifindex};
    memcpy(body.gid, gid->raw, sizeof body.gid);
    struct call call = {.type = RUN_GROUP, .in = &body, .in_size = sizeof body, .sent_fd = -1};
    int code = control_call(&call);
    if (!code && call.fds_count != 1)
        code = EPROTO;
    if (!code)
        return call.fds[0];
    while (call.fds_count)
        close(call.fds[--call.fds_count]);
    return fail(code);
}

/* Change who is attached; false without memory. With the mutex. */
static bool add_member(struct rdmacm_group *group, uint32_t qp_num) {
    uint32_t *members = realloc(group->members, (group->members_count + 1) * sizeof *members);
    if (!members)
        return false;
    group->members = members;
    members[group->members_count++] = qp_num;
    return true;
}

static bool remove_member(struct rdmacm_group *group, uint32_t qp_num) {
    for (size_t i = 0; i < group->members_count; i++)
        if (group->members[i] == qp_num) {
            group->members[i] = group->members[--group->members_count];
            return true;
        }
    return false;
}

static int socket_of(const struct rdmacm_wire *wire, const struct rdmacm_group *group) {
    for (size_t i = 0; i < wire->sources_count; i++)
        if (wire->sources[i].group == group)
            return wire->sources[i].fd;
    return -1;
}

static struct rdmacm_group *find(struct rdmacm_wire *wire, struct ibv_qp *qp, const union ibv_gid *gid,
                                 const uint8_t **address, bool *is_ipv6) {
    *is_ipv6 = gid_address(gid, address) == 16;
    return rdmacm_wire_find_group(wire, *address, *is_ipv6, context_of(qp->context)->device->info.ifindex);
}

EXPORT int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid) {
    (void)lid;
    struct rdmacm_wire *wire = process_wire();
    const uint8_t *address;
    bool is_ipv6;
    if (qp->qp_type != IBV_QPT_UD || !wire)
        return EINVAL;
    int code = 0, fd = -1;
    rdmacm_enter();
    struct rdmacm_group *group = find(wire, qp, gid, &address, &is_ipv6);
    rdmacm_leave();
    if (!group && (fd = ask_socket(qp->context, gid)) < 0)
        return errno;
    rdmacm_enter();
    group = find(wire, qp, gid, &address, &is_ipv6);
    if (!group && fd >= 0) {
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        if (!epoll_ctl(wire->poll_fd, EPOLL_CTL_ADD, fd, &event) &&
            rdmacm_wire_add_group(wire, fd, address, is_ipv6, context_of(qp->context)->device->info.ifindex))
            fd = -1; /* the wire's */
        group = find(wire, qp, gid, &address, &is_ipv6);
    }
    if (!group || !add_member(group, qp->qp_num))
        code = ENOMEM;
    else
        qp_of(qp)->groups++;
    rdmacm_leave();
    if (fd >= 0)
        close(fd);
    return code;
}

EXPORT int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid) {
    (void)lid;
    struct rdmacm_wire *wire = process_wire();
    const uint8_t *address;
    bool is_ipv6;
    int fd = -1;
    if (!wire)
        return EINVAL;
    rdmacm_enter();
    struct rdmacm_group *group = find(wire, qp, gid, &address, &is_ipv6);
    bool done = group && remove_member(group, qp->qp_num);
    if (done) {
        qp_of(qp)->groups--;
        if (!group->members_count) {
            fd = socket_of(wire, group);
            epoll_ctl(wire->poll_fd, EPOLL_CTL_DEL, fd, NULL);
            rdmacm_wire_remove_group(wire, fd);
        }
    }
    rdmacm_leave();
    if (fd >= 0)
        close(fd);
    return done ? 0 : EINVAL;
}
