/* Address handles, and how GIDs become routes. */
#include "objects.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const uint8_t mapped[12] = {[10] = 0xFF, [11] = 0xFF}; /* ::ffff:0:0/96 */

size_t gid_address(const union ibv_gid *gid, const uint8_t **address) {
    bool is_ipv4 = !memcmp(gid->raw, mapped, sizeof mapped);
    *address = gid->raw + (is_ipv4 ? sizeof mapped : 0);
    return is_ipv4 ? 4 : 16;
}

int route_of(struct ibv_context *context, const struct ibv_ah_attr *attr, struct rdmacm_route *route, uint8_t *local,
             uint8_t *remote, size_t *length, uint32_t *scope) {
    union ibv_gid source;
    const uint8_t *from, *to;
    if (!attr->is_global || attr->port_num != 1)
        return EINVAL;
    if (ibv_query_gid(context, 1, attr->grh.sgid_index, &source))
        return EINVAL;
    *length = gid_address(&source, &from);
    if (gid_address(&attr->grh.dgid, &to) != *length)
        return EINVAL;
    bool is_ipv6 = *length == 16;
    *scope = is_ipv6 && rdmacm_is_link_local(to) ? context_of(context)->device->info.ifindex : 0;
    memcpy(local, from, *length);
    memcpy(remote, to, *length);
    rdmacm_route_init(route, remote, is_ipv6, RDMACM_ROCE_PORT, *scope, RDMACM_LONGEST_TRAIN);
    int level = is_ipv6 ? IPPROTO_IPV6 : IPPROTO_IP, traffic_class = attr->grh.traffic_class;
    if (is_ipv6) {
        struct in6_pktinfo own = {.ipi6_ifindex = *scope};
        memcpy(&own.ipi6_addr, local, 16);
        rdmacm_route_add(route, level, IPV6_PKTINFO, &own, sizeof own);
    } else {
        struct in_pktinfo own = {0};
        memcpy(&own.ipi_spec_dst, local, 4);
        rdmacm_route_add(route, level, IP_PKTINFO, &own, sizeof own);
    }
    if (traffic_class)
        rdmacm_route_add(route, level, is_ipv6 ? IPV6_TCLASS : IP_TOS, &traffic_class, sizeof traffic_class);
    return 0;
}

/* -- address handles --------------------------------------------------------------------------------------------------- */

EXPORT struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr) {
    uint8_t local[16], remote[16];
    size_t length;
    uint32_t scope;
    struct ah *ah = calloc(1, sizeof *ah);
    int code = ah ? route_of(pd->context, attr, &ah->route, local, remote, &length, &scope) : ENOMEM;
    if (code) {
        free(ah);
        errno = code;
        return NULL;
    }
    rdmacm_flow_init(&ah->flow, local, remote, length, RDMACM_ROCE_PORT, RDMACM_ROCE_PORT);
    ah->ibv = (struct ibv_ah){.context = pd->context, .pd = pd};
    ah->pd = pd_of(pd);
    ah->uses = 1;
    rdmacm_enter();
    ah->pd->uses++;
    rdmacm_leave();
    return &ah->ibv;
}

EXPORT int ibv_destroy_ah(struct ibv_ah *ibv) {
    struct ah *ah = (struct ah *)ibv;
    rdmacm_enter();
    ah->pd->uses--;
    rdmacm_leave();
    if (!__atomic_sub_fetch(&ah->uses, 1, __ATOMIC_ACQ_REL))
        free(ah);
    return 0;
}

/* The GRH is that of IPv6, or has an IPv4 header in its last 20 bytes. */
static void gids_of_grh(const struct ibv_grh *grh, union ibv_gid *source, union ibv_gid *destination,
                        uint8_t *traffic_class) {
    const uint8_t *bytes = (const uint8_t *)grh, *ipv4 = bytes + RDMACM_GRH_LENGTH - 20;
    if (ipv4[0] == 0x45 && bytes[0] >> 4 != 6) {
        memcpy(source->raw, mapped, sizeof mapped);
        memcpy(destination->raw, mapped, sizeof mapped);
        memcpy(source->raw + sizeof mapped, ipv4 + 12, 4);
        memcpy(destination->raw + sizeof mapped, ipv4 + 16, 4);
        *traffic_class = ipv4[1];
    } else {
        memcpy(source->raw, bytes + 8, 16);
        memcpy(destination->raw, bytes + 24, 16);
        *traffic_class = (uint8_t)(bytes[0] << 4 | bytes[1] >> 4);
    }
}

static int index_of_gid(struct ibv_context *context, const union ibv_gid *gid) {
    const struct device *device = context_of(context)->device;
    for (uint32_t i = 0; i < device->info.gids_count; i++)
        if (!memcmp(device->gids[i].gid, gid->raw, sizeof gid->raw))
            return (int)device->gids[i].index;
    return -1;
}

EXPORT int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh,
                               struct ibv_ah_attr *attr) {
    union ibv_gid local;
    if (!(wc->wc_flags & IBV_WC_GRH))
        return fail(EINVAL);
    *attr = (struct ibv_ah_attr){.port_num = port, .is_global = 1};
    gids_of_grh(grh, &attr->grh.dgid, &local, &attr->grh.traffic_class);
    int index = index_of_gid(context, &local);
    attr->grh.sgid_index = (uint8_t)(index < 0 ? 0 : index);
    attr->grh.hop_limit = 0xFF;
    return 0;
}

EXPORT struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port) {
    struct ibv_ah_attr attr;
    return ibv_init_ah_from_wc(pd->context, port, wc, grh, &attr) ? NULL : ibv_create_ah(pd, &attr);
}

EXPORT int ibv_resolve_eth_l2_from_gid(struct ibv_context *context, struct ibv_ah_attr *attr, uint8_t mac[6],
                                       uint16_t *vid) {
    (void)context, (void)attr;
    memset(mac, 0, 6);
    if (vid)
        *vid = 0xFFFF;
    return 0;
}
