/* Preloaded into librdmacm's udpong.
 *
 * librdmacm makes an address handle for the port of each datagram socket itself, with the LID only. On Ethernet that is
 * an error: there are no LIDs, and each address handle has a GRH. Here it gets one, with a GID of the port. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <string.h>

#undef ibv_create_ah

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *given)
{
    struct ibv_ah *(*original)(struct ibv_pd *, struct ibv_ah_attr *) = dlsym(RTLD_NEXT, "ibv_create_ah");
    struct ibv_ah_attr attr = *given;
    union ibv_gid gid, none;

    memset(&none, 0, sizeof(none));
    for (int row = 0; !attr.is_global && row < 16; row++) {
        if (ibv_query_gid(pd->context, attr.port_num, row, &gid) == 0 && gid.raw[10] == 0xff) {
            attr.is_global = 1;
            attr.grh.dgid = gid;
            attr.grh.sgid_index = row;
            attr.grh.hop_limit = 64;
        }
    }
    return original(pd, &attr);
}
