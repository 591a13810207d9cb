/* librdmacm: rdma_getaddrinfo(3), which the server does. */
#include "cm.h"

#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>

/* -- the request --------------------------------------------------------------------------------------------------- */

static bool set_hints(struct run_addrinfo *to, const struct rdma_addrinfo *hints) {
    *to = (struct run_addrinfo){.has_hints = hints != NULL};
    if (!hints)
        return true;
    to->flags = hints->ai_flags;
    to->family = hints->ai_family;
    to->qp_type = hints->ai_qp_type;
    to->port_space = hints->ai_port_space;
    size_t source = hints->ai_src_addr ? hints->ai_src_len : 0;
    size_t destination = hints->ai_dst_addr ? hints->ai_dst_len : 0;
    if (source > sizeof to->source || destination > sizeof to->destination)
        return false;
    to->source_length = (uint32_t)source;
    to->destination_length = (uint32_t)destination;
    if (source)
        memcpy(to->source, hints->ai_src_addr, source);
    if (destination)
        memcpy(to->destination, hints->ai_dst_addr, destination);
    return true;
}

/* -- the results --------------------------------------------------------------------------------------------------- */

/* What is left of the reply. */
struct rest {
    const uint8_t *bytes;
    size_t length;
};

/* Copy the next part to new memory, where it has bytes, and skip to where the next begins; false: there is no such. */
static bool take_part(struct rest *rest, size_t length, void *result) {
    if (length > rest->length)
        return false;
    void *copy = length ? malloc(length) : NULL;
    if (length && !copy)
        return false;
    if (length)
        memcpy(copy, rest->bytes, length);
    memcpy(result, &copy, sizeof copy);
    size_t skipped = (length + 7) & ~(size_t)7;
    if (skipped > rest->length)
        skipped = rest->length;
    rest->bytes += skipped;
    rest->length -= skipped;
    return true;
}

static bool take_result(struct rest *rest, struct rdma_addrinfo *to) {
    struct run_result from;
    if (rest->length < sizeof from)
        return false;
    memcpy(&from, rest->bytes, sizeof from);
    rest->bytes += sizeof from;
    rest->length -= sizeof from;
    to->ai_flags = from.flags;
    to->ai_family = from.family;
    to->ai_qp_type = from.qp_type;
    to->ai_port_space = from.port_space;
    to->ai_src_len = from.source_length;
    to->ai_dst_len = from.destination_length;
    to->ai_route_len = from.route_length;
    to->ai_connect_len = from.connect_length;
    return take_part(rest, from.source_length, &to->ai_src_addr) &&
           take_part(rest, from.destination_length, &to->ai_dst_addr) &&
           take_part(rest, from.source_name_length, &to->ai_src_canonname) &&
           take_part(rest, from.destination_name_length, &to->ai_dst_canonname) &&
           take_part(rest, from.route_length, &to->ai_route) && take_part(rest, from.connect_length, &to->ai_connect);
}

EXPORT void rdma_freeaddrinfo(struct rdma_addrinfo *info) {
    while (info) {
        struct rdma_addrinfo *next = info->ai_next;
        free(info->ai_src_addr);
        free(info->ai_dst_addr);
        free(info->ai_src_canonname);
        free(info->ai_dst_canonname);
        free(info->ai_route);
        free(info->ai_connect);
        free(info);
        info = next;
    }
}

static int take_results(struct rest *rest, struct rdma_addrinfo **result) {
    struct run_addrinfos head;
    struct rdma_addrinfo *first = NULL, **link = &first;
    bool done = rest->length >= sizeof head;
    if (done) {
        memcpy(&head, rest->bytes, sizeof head);
        rest->bytes += sizeof head;
        rest->length -= sizeof head;
    }
    for (uint32_t i = 0; done && i < head.count; i++) {
        *link = calloc(1, sizeof **link);
        done = *link && take_result(rest, *link);
        if (*link)
            link = &(*link)->ai_next;
    }
    if (!done || !first) {
        rdma_freeaddrinfo(first);
        return EPROTO;
    }
    *result = first;
    return 0;
}

/* -- the call ------------------------------------------------------------------------------------------------------ */

/* 0, an errno, or a negative code of getaddrinfo(3). */
static int look_up(const char *node, const char *service, const struct run_addrinfo *hints,
                   struct rdma_addrinfo **result) {
    char names[NI_MAXHOST + NI_MAXSERV] = "";
    size_t node_size = strlen(node) + 1, service_size = strlen(service) + 1;
    uint8_t *reply = malloc(RUN_MOST);
    if (!reply)
        return ENOMEM;
    memcpy(names, node, node_size);
    memcpy(names + node_size, service, service_size);
    struct call call = {.type = RUN_ADDRINFO, .in = hints, .in_size = sizeof *hints, .more = names,
                        .more_size = node_size + service_size, .sent_fd = -1, .out = reply, .out_size = RUN_MOST};
    int code = control_call(&call);
    if (!code)
        code = take_results(&(struct rest){.bytes = reply, .length = call.size}, result);
    free(reply);
    return code;
}

EXPORT int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints,
                            struct rdma_addrinfo **result) {
    struct run_addrinfo request;
    if ((!node && !service && !hints) || !set_hints(&request, hints))
        return fail(EINVAL);
    bool has_service = service && *service;
    if (node ? !*node || strlen(node) >= NI_MAXHOST : service && !has_service)
        return EAI_NONAME; /* the request has no difference between an empty name and none */
    if (has_service && strlen(service) >= NI_MAXSERV)
        return EAI_NONAME;
    int code = look_up(node ? node : "", has_service ? service : "", &request, result);
    return code > 0 ? fail(code == ENOSYS || code == ENOTCONN ? ENODEV : code) : code;
}
