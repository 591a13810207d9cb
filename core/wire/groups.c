/* Multicast groups of a wire: each packet is delivered to every queue pair that is attached to its group. */
#include "rdmacm_wire.h"

#include <stdlib.h>
#include <string.h>

bool rdmacm_wire_add_group(struct rdmacm_wire *wire, int fd, const uint8_t *address, bool is_ipv6, uint32_t ifindex) {
    struct rdmacm_group *group = calloc(1, sizeof *group);
    if (!group || !rdmacm_wire_add_source(wire, fd, group)) {
        free(group);
        return false;
    }
    group->is_ipv6 = is_ipv6;
    memcpy(group->address, address, is_ipv6 ? 16 : 4);
    group->ifindex = ifindex;
    group->next = wire->groups;
    wire->groups = group;
    return true;
}

struct rdmacm_group *rdmacm_wire_find_group(const struct rdmacm_wire *wire, const uint8_t *address, bool is_ipv6,
                                            uint32_t ifindex) {
    struct rdmacm_group *group = wire->groups;
    while (group && (group->is_ipv6 != is_ipv6 || group->ifindex != ifindex ||
                     memcmp(group->address, address, is_ipv6 ? 16 : 4) != 0))
        group = group->next;
    return group;
}

/* Its packets that wait stay: the owner finds that they are for nobody. */
static void forget_arrivals(struct rdmacm_arrival *arrival, const struct rdmacm_group *group) {
    for (; arrival; arrival = arrival->next)
        if (arrival->group == group)
            arrival->group = NULL;
}

static void remove_source(struct rdmacm_wire *wire, size_t index) {
    struct rdmacm_group *group = wire->sources[index].group, **place = &wire->groups;
    if (wire->recent == wire->sources[index].fd)
        wire->recent = -1;
    wire->sources[index] = wire->sources[--wire->sources_count];
    while (*place != group)
        place = &(*place)->next;
    *place = group->next;
    forget_arrivals(wire->arrivals, group);
    forget_arrivals(wire->processing, group);
    free(group->members);
    free(group);
}

void rdmacm_wire_remove_group(struct rdmacm_wire *wire, int fd) {
    for (size_t i = 0; i < wire->sources_count; i++) {
        if (wire->sources[i].fd == fd && wire->sources[i].group) {
            remove_source(wire, i);
            break;
        }
    }
    if (wire->service)
        rdmacm_service_wake(wire);
}

void rdmacm_wire_remove_groups(struct rdmacm_wire *wire) {
    for (size_t i = wire->sources_count; i--;)
        if (wire->sources[i].group)
            remove_source(wire, i);
}

/* Whether no member needs the owner to get a packet. */
static bool is_ready(const struct rdmacm_wire *wire, const struct rdmacm_group *group) {
    bool is_done = !group->waiting.queued;
    for (size_t i = 0; is_done && i < group->members_count; i++) {
        const struct rdmacm_known *known = rdmacm_wire_find(wire, group->members[i]);
        is_done = known && (known->accepts == RDMACM_ACCEPTS_NONE ||
                            (known->conn && known->conn->ud && !known->queued));
    }
    return is_done;
}

void rdmacm_group_deliver(struct rdmacm_wire *wire, struct rdmacm_group *group, const struct rdmacm_received *from) {
    if (from->size < RDMACM_SHORTEST_PACKET || !from->local_length) {
        wire->tally->strays[RDMACM_SHORT]++;
        return;
    }
    if ((rdmacm_load32(wire->buffer + 4) & RDMACM_QPN_MASK) != RDMACM_MULTICAST_QPN ||
        from->ifindex != group->ifindex || (from->local_length == 16) != group->is_ipv6) {
        wire->tally->strays[RDMACM_STRAY]++; /* an IPv6 socket gets the packets of other interfaces */
        return;
    }
    if (!group->members_count) {
        wire->tally->strays[RDMACM_NO_MEMBER]++;
        return;
    }
    struct rdmacm_received to_group = *from;
    memcpy(to_group.local, group->address, from->local_length);
    if (!is_ready(wire, group)) {
        rdmacm_wire_leave(wire, &to_group, 0, from->size, RDMACM_MULTICAST_QPN, group);
        return;
    }
    for (size_t i = 0; i < group->members_count; i++) {
        const struct rdmacm_known *known = rdmacm_wire_find(wire, group->members[i]);
        if (!known->conn || known->conn->queues->failed) {
            wire->tally->strays[RDMACM_WRONG_STATE]++;
        } else if (!rdmacm_ud_deliver(known->conn->ud, &to_group, 0, from->size)) {
            wire->tally->counts.dropped++;
            wire->has_counts = true;
        }
    }
    wire->taken++;
}
