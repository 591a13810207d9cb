/* The packets of the program for a capture file, which the server writes: each goes to it as it is read, or before it is
 * sent, so that those of all programs are in the order in which they happened. A server that does not keep up slows the
 * program down. */
#include "objects.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int tap_fd = -1; /* with rdmacm_enter() */

bool tap_start(void) {
    struct call call = {.type = RUN_TAP, .sent_fd = -1};
    int code = control_call(&call);
    if (!code && call.fds_count == 1) {
        if (tap_fd >= 0) /* that of the parent, after fork(2) */
            close(tap_fd);
        tap_fd = call.fds[0];
        return true;
    }
    while (call.fds_count)
        close(call.fds[--call.fds_count]);
    return false;
}

static void pass_on(struct run_tapped *tapped, uint8_t *payload, size_t size) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    tapped->nanoseconds = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    struct iovec pieces[] = {
        {.iov_base = tapped, .iov_len = sizeof *tapped},
        {.iov_base = payload, .iov_len = size},
    };
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    ssize_t sent;
    do
        sent = sendmsg(tap_fd, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent < 0) { /* the server has gone */
        close(tap_fd);
        tap_fd = -1;
    }
}

/* The port and the address of either family; its length. */
static uint32_t read_address(const struct sockaddr_storage *from, uint8_t *address, uint16_t *port) {
    const struct sockaddr_in *ipv4 = (const struct sockaddr_in *)from;
    const struct sockaddr_in6 *ipv6 = (const struct sockaddr_in6 *)from;
    bool is_ipv6 = from->ss_family == AF_INET6;
    *port = ntohs(is_ipv6 ? ipv6->sin6_port : ipv4->sin_port);
    memcpy(address, is_ipv6 ? (const void *)&ipv6->sin6_addr : &ipv4->sin_addr, is_ipv6 ? 16 : 4);
    return is_ipv6 ? 16 : 4;
}

/* A route has the source in its first ancillary data. */
static void read_source(const struct rdmacm_route *route, uint8_t *address) {
    const uint8_t *info = route->control + CMSG_LEN(0);
    if (route->is_ipv6)
        memcpy(address, info + offsetof(struct in6_pktinfo, ipi6_addr), 16);
    else
        memcpy(address, info + offsetof(struct in_pktinfo, ipi_spec_dst), 4);
}

void tap_sends(struct rdmacm_wire *wire, const struct rdmacm_route *route, const struct rdmacm_datagram *datagram) {
    static uint8_t payload[RDMACM_LONGEST_DATAGRAM];
    struct run_tapped tapped = {.is_out = 1, .local_port = RDMACM_ROCE_PORT, .segment = (uint32_t)datagram->segment};
    if (tap_fd < 0 || datagram->bytes > sizeof payload)
        return;
    tapped.address_length = read_address(&route->address, tapped.remote, &tapped.remote_port);
    read_source(route, tapped.local);
    rdmacm_wire_copy(&wire->out, datagram, 0, datagram->bytes, payload);
    pass_on(&tapped, payload, datagram->bytes);
}

void tap_has_read(struct rdmacm_wire *wire, const struct rdmacm_received *from) {
    struct run_tapped tapped = {.local_port = RDMACM_ROCE_PORT, .segment = (uint32_t)from->segment};
    if (tap_fd < 0)
        return;
    tapped.address_length = read_address(&from->source, tapped.remote, &tapped.remote_port);
    if (from->local_length != tapped.address_length)
        return;
    memcpy(tapped.local, from->local, from->local_length);
    pass_on(&tapped, wire->buffer, from->size);
}
