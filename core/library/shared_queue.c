/* Shared receive queues, and XRC domains. */
#include "objects.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { MOST_RECVS = 1 << 16 };

/* -- domains ----------------------------------------------------------------------------------------------------------- */

/* Domains that a file names. The kernel shares them between processes; here they are those of this process. */
static struct xrcd *named;

static struct xrcd *find_named(const struct stat *file) {
    struct xrcd *xrcd = named;
    while (xrcd && (xrcd->device != file->st_dev || xrcd->inode != file->st_ino))
        xrcd = xrcd->next;
    return xrcd;
}

struct ibv_xrcd *verbs_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr) {
    struct stat file = {0};
    bool is_named = attr->fd >= 0;
    if (attr->comp_mask != (IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS) || attr->oflags & ~(O_CREAT | O_EXCL) ||
        (is_named && fstat(attr->fd, &file)) || (!is_named && !(attr->oflags & O_CREAT))) {
        errno = EINVAL;
        return NULL;
    }
    struct xrcd *made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    made->ibv.context = context;
    made->device = file.st_dev, made->inode = file.st_ino;
    made->opened = 1;
    rdmacm_enter();
    struct xrcd *found = is_named ? find_named(&file) : NULL;
    int code = found && attr->oflags & O_EXCL ? EINVAL : !found && !(attr->oflags & O_CREAT) ? ENOENT : 0;
    if (found && !code) {
        found->opened++;
    } else if (!code && is_named) {
        made->next = named;
        named = made;
    }
    rdmacm_leave();
    if (found || code)
        free(made);
    if (code) {
        errno = code;
        return NULL;
    }
    return found ? &found->ibv : &made->ibv;
}

int verbs_close_xrcd(struct ibv_xrcd *ibv) {
    struct xrcd *xrcd = (struct xrcd *)ibv;
    rdmacm_enter();
    bool is_last = xrcd->opened == 1, is_used = is_last && xrcd->uses;
    if (!is_used)
        xrcd->opened--;
    struct xrcd **place = &named;
    while (is_last && !is_used && *place && *place != xrcd)
        place = &(*place)->next;
    if (is_last && !is_used && *place)
        *place = xrcd->next;
    rdmacm_leave();
    if (is_used)
        return EBUSY;
    if (is_last) {
        rdmacm_table_free(&xrcd->queues);
        free(xrcd);
    }
    return 0;
}

/* -- queues ------------------------------------------------------------------------------------------------------------ */

/* The number is random: that of a queue of another process, which a program may take for one of this domain, is no number
 * here. */
static bool add_to_domain(struct srq *srq) {
    for (int i = 0; i < 16; i++) {
        process_random(&srq->number, sizeof srq->number);
        srq->number &= RDMACM_QPN_MASK;
        if (srq->number && rdmacm_table_add(&srq->xrcd->queues, srq->number, &srq->core))
            return true;
    }
    return false;
}

static struct srq *all;

void srqs_revoke(uint32_t key) {
    for (struct srq *srq = all; srq; srq = srq->next)
        rdmacm_srq_look_up(&srq->core, &process_regions, srq->core.pd, key);
}

void srqs_forget(void) {
    all = NULL;
    named = NULL;
}

struct ibv_srq *verbs_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr) {
    bool is_xrc = attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE && attr->srq_type == IBV_SRQT_XRC;
    uint32_t needed = IBV_SRQ_INIT_ATTR_PD | (is_xrc ? IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ : 0u);
    bool is_right = attr->attr.max_wr && attr->attr.max_wr <= MOST_RECVS && attr->attr.max_sge <= RDMACM_MOST_ELEMENTS &&
                    (attr->comp_mask & needed) == needed &&
                    (is_xrc || !(attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE) || attr->srq_type == IBV_SRQT_BASIC);
    struct srq *srq = is_right ? calloc(1, sizeof *srq) : NULL;
    if (!srq) {
        errno = is_right ? ENOMEM : EINVAL;
        return NULL;
    }
    srq->ibv = (struct ibv_srq){.context = context, .srq_context = attr->srq_context, .pd = attr->pd};
    pthread_mutex_init(&srq->ibv.mutex, NULL);
    pthread_cond_init(&srq->ibv.cond, NULL);
    rdmacm_srq_init(&srq->core, attr->attr.max_wr);
    srq->pd = pd_of(attr->pd);
    srq->max_sge = attr->attr.max_sge ? attr->attr.max_sge : 1;
    srq->core.pd = srq->pd->number;
    bool done = true;
    rdmacm_enter();
    if (is_xrc) {
        srq->xrcd = (struct xrcd *)attr->xrcd;
        srq->cq = cq_of(attr->cq);
        srq->core.cq = &srq->cq->core;
        done = add_to_domain(srq);
        srq->xrcd->uses += done;
        srq->cq->uses += done;
    }
    srq->pd->uses += done;
    if (done) {
        srq->is_listed = true;
        srq->next = all;
        all = srq;
    }
    rdmacm_leave();
    if (!done) {
        free(srq);
        errno = ENOMEM;
        return NULL;
    }
    return &srq->ibv;
}

EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr) {
    struct ibv_srq_init_attr_ex extended = {.srq_context = attr->srq_context, .attr = attr->attr,
                                            .comp_mask = IBV_SRQ_INIT_ATTR_PD, .pd = pd};
    return verbs_create_srq_ex(pd->context, &extended);
}

int verbs_get_srq_num(struct ibv_srq *ibv, uint32_t *number) {
    const struct srq *srq = srq_of(ibv);
    if (!srq->xrcd)
        return EOPNOTSUPP;
    *number = srq->number;
    return 0;
}

EXPORT int ibv_modify_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr, int mask) {
    struct srq *srq = srq_of(ibv);
    int code = mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) ? EINVAL : 0;
    rdmacm_enter();
    if (!code && mask & IBV_SRQ_MAX_WR) {
        if (!attr->max_wr || attr->max_wr > MOST_RECVS || attr->max_wr < srq->core.recvs_count)
            code = EINVAL;
        else
            srq->core.max_recvs = attr->max_wr;
    }
    if (!code && mask & IBV_SRQ_LIMIT) {
        if (attr->srq_limit > srq->core.max_recvs)
            code = EINVAL;
        else
            srq->core.limit = attr->srq_limit;
    }
    rdmacm_leave();
    return code;
}

EXPORT int ibv_query_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr) {
    struct srq *srq = srq_of(ibv);
    rdmacm_enter();
    *attr = (struct ibv_srq_attr){.max_wr = (uint32_t)srq->core.max_recvs, .max_sge = (uint32_t)srq->max_sge,
                                  .srq_limit = (uint32_t)srq->core.limit};
    rdmacm_leave();
    return 0;
}

EXPORT int ibv_destroy_srq(struct ibv_srq *ibv) {
    struct srq *srq = srq_of(ibv);
    rdmacm_enter();
    if (srq->uses) {
        rdmacm_leave();
        return EBUSY;
    }
    if (srq->xrcd) {
        rdmacm_table_remove(&srq->xrcd->queues, srq->number);
        srq->xrcd->uses--;
        srq->cq->uses--;
    }
    for (size_t i = 0; i < srq->core.recvs_count; i++)
        pin_free(RDMACM_RING_AT(&srq->core, recvs, i)->pin);
    rdmacm_srq_free(&srq->core);
    RDMACM_UNLIST(all, srq, next, is_listed);
    srq->pd->uses--;
    rdmacm_leave();
    free(srq);
    return 0;
}
