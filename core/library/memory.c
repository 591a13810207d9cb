/* Protection domains, registered memory, memory windows. */
#include "objects.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static uint64_t numbers; /* of protection domains and registrations */

/* -- protection domains ------------------------------------------------------------------------------------------------ */

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    struct pd *pd = calloc(1, sizeof *pd);
    if (!pd)
        return NULL;
    pd->ibv.context = context;
    rdmacm_enter();
    pd->number = ++numbers;
    rdmacm_leave();
    pd->ibv.handle = (uint32_t)pd->number;
    return &pd->ibv;
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *ibv) {
    struct pd *pd = pd_of(ibv);
    rdmacm_enter();
    bool is_used = pd->uses;
    rdmacm_leave();
    if (is_used)
        return EBUSY;
    free(pd);
    return 0;
}

/* -- memory ------------------------------------------------------------------------------------------------------------ */

enum {
    KNOWN_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
                   IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_FLUSH_GLOBAL,
    NEED_LOCAL_WRITE = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
    OPTIONAL_ACCESS = 0x3FF00000, /* IBV_ACCESS_OPTIONAL_RANGE: dropped by who does not know them */
    KEY_TRIES = 16,
};

/* 0, or why memory cannot be registered so. */
static int check_access(unsigned int access) {
    access &= ~(unsigned int)OPTIONAL_ACCESS;
    if (access & ~(unsigned int)KNOWN_ACCESS)
        return access & (IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB | IBV_ACCESS_FLUSH_PERSISTENT) ? EOPNOTSUPP : EINVAL;
    return access & NEED_LOCAL_WRITE && !(access & IBV_ACCESS_LOCAL_WRITE) ? EINVAL : 0;
}

static struct rdmacm_region region_of(struct mr *mr) {
    return (struct rdmacm_region){.address = mr->iova, .length = mr->ibv.length, .pd = mr->pd->number,
                                  .memory = mr->ibv.addr, .pin = mr, .owner = (uintptr_t)mr, .access = mr->access};
}

/* Add the region under a new key; 0: no memory. With the mutex. */
static uint32_t add_region(struct mr *mr) {
    struct rdmacm_region region = region_of(mr);
    for (int i = 0; i < KEY_TRIES; i++) {
        uint32_t key;
        process_random(&key, sizeof key);
        if (key && !rdmacm_table_find(&process_regions.windows, key >> 8) &&
            rdmacm_regions_add(&process_regions, key, &region))
            return key;
    }
    return 0;
}

static struct ibv_mr *register_memory(struct ibv_pd *ibv, void *address, size_t length, uint64_t iova,
                                      unsigned int access) {
    int code = check_access(access);
    if (!code && length > UINT64_MAX - iova)
        code = EINVAL;
    struct mr *mr = code ? NULL : calloc(1, sizeof *mr);
    if (!mr) {
        errno = code ? code : ENOMEM;
        return NULL;
    }
    access &= ~(unsigned int)OPTIONAL_ACCESS;
    mr->pd = pd_of(ibv);
    mr->iova = access & IBV_ACCESS_ZERO_BASED ? 0 : iova;
    mr->access = access & ~(unsigned int)IBV_ACCESS_ZERO_BASED;
    mr->ibv = (struct ibv_mr){.context = ibv->context, .pd = ibv, .addr = address, .length = length};
    rdmacm_enter();
    uint32_t key = add_region(mr);
    mr->pd->uses += key != 0;
    rdmacm_leave();
    if (!key) {
        free(mr);
        errno = ENOMEM;
        return NULL;
    }
    mr->ibv.lkey = mr->ibv.rkey = mr->ibv.handle = key;
    return &mr->ibv;
}

EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access) {
    return register_memory(pd, address, length, (uintptr_t)address, (unsigned int)access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access) {
    return register_memory(pd, address, length, iova, (unsigned int)access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova,
                                       unsigned int access) {
    return register_memory(pd, address, length, iova, access);
}

EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                        int access) {
    (void)pd, (void)offset, (void)length, (void)iova, (void)fd, (void)access;
    errno = EOPNOTSUPP;
    return NULL;
}

/* The program may free memory that its key does not stand for any more, although requests have it. With the mutex. */
static void revoke(uint32_t key) {
    process_revoke(key);
    srqs_revoke(key);
}

EXPORT int ibv_dereg_mr(struct ibv_mr *ibv) {
    struct mr *mr = (struct mr *)ibv;
    rdmacm_enter();
    bool is_bound = rdmacm_regions_bound(&process_regions, ibv->lkey);
    if (!is_bound) {
        rdmacm_regions_remove(&process_regions, ibv->lkey);
        revoke(ibv->lkey);
        mr->pd->uses--;
    }
    rdmacm_leave();
    if (is_bound)
        return EBUSY;
    free(mr);
    return 0;
}

EXPORT int ibv_rereg_mr(struct ibv_mr *ibv, int flags, struct ibv_pd *pd, void *address, size_t length, int access) {
    struct mr *mr = (struct mr *)ibv, changed = *mr;
    if (flags & ~(IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS) || !flags ||
        (flags & IBV_REREG_MR_CHANGE_TRANSLATION && (!length || !address)))
        return IBV_REREG_MR_ERR_INPUT;
    if (flags & IBV_REREG_MR_CHANGE_ACCESS && check_access((unsigned int)access))
        return IBV_REREG_MR_ERR_INPUT;
    if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
        changed.ibv.addr = address, changed.ibv.length = length;
        changed.iova = (uintptr_t)address;
    }
    if (flags & IBV_REREG_MR_CHANGE_ACCESS)
        changed.access = (uint32_t)access & ~(uint32_t)(OPTIONAL_ACCESS | IBV_ACCESS_ZERO_BASED);
    if (flags & IBV_REREG_MR_CHANGE_PD)
        changed.pd = pd_of(pd), changed.ibv.pd = pd;
    rdmacm_enter();
    struct rdmacm_region *region = rdmacm_table_find(&process_regions.table, ibv->lkey);
    bool is_free = region && !region->windows;
    if (is_free) {
        mr->pd->uses--;
        changed.pd->uses++;
        *mr = changed;
        *region = region_of(mr);
        revoke(ibv->lkey);
    }
    rdmacm_leave();
    return is_free ? 0 : IBV_REREG_MR_ERR_CMD;
}

/* -- memory windows ---------------------------------------------------------------------------------------------------- */

struct ibv_mw *verbs_alloc_mw(struct ibv_pd *ibv, enum ibv_mw_type type) {
    struct mw *mw = type == IBV_MW_TYPE_1 || type == IBV_MW_TYPE_2 ? calloc(1, sizeof *mw) : NULL;
    if (!mw) {
        errno = EINVAL;
        return NULL;
    }
    mw->pd = pd_of(ibv);
    mw->window.pd = mw->pd->number;
    mw->window.is_type_2 = type == IBV_MW_TYPE_2;
    bool done = false;
    uint32_t key = 0;
    rdmacm_enter();
    for (int i = 0; i < KEY_TRIES && !done; i++) {
        process_random(&key, sizeof key);
        done = key >> 8 && !rdmacm_table_find(&process_regions.table, key) &&
               rdmacm_window_allocate(&process_regions, &mw->window, key);
    }
    mw->pd->uses += done;
    rdmacm_leave();
    if (!done) {
        free(mw);
        errno = ENOMEM;
        return NULL;
    }
    mw->ibv = (struct ibv_mw){.context = ibv->context, .pd = ibv, .rkey = key, .handle = key, .type = type};
    return &mw->ibv;
}

int verbs_dealloc_mw(struct ibv_mw *ibv) {
    struct mw *mw = (struct mw *)ibv;
    rdmacm_enter();
    rdmacm_window_deallocate(&mw->window);
    mw->pd->uses--;
    rdmacm_leave();
    free(mw);
    return 0;
}

int verbs_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind) {
    if (mw->type != IBV_MW_TYPE_1 || mw->pd != qp->pd || (bind->bind_info.mr && bind->bind_info.mr->pd != mw->pd))
        return EINVAL;
    struct ibv_send_wr wr = {.wr_id = bind->wr_id, .opcode = IBV_WR_BIND_MW, .send_flags = bind->send_flags}, *bad;
    wr.bind_mw.mw = mw;
    wr.bind_mw.bind_info = bind->bind_info;
    wr.bind_mw.rkey = (mw->rkey & ~0xFFu) | ((mw->rkey + 1) & 0xFF);
    int code = verbs_post_send(qp, &wr, &bad);
    if (!code)
        mw->rkey = wr.bind_mw.rkey;
    return code;
}
