/* Names that programs never find elsewhere: without them here, a program that preloads this library would get those of
 * another libibverbs or librdmacm, which knows nothing of our objects. */
#include "library.h"

#include <errno.h>

/* For libraries of adapters, which have no adapter here; and what the software device does not have. */
#define REFUSED_INT(name)                                                                                              \
    EXPORT int name(void);                                                                                             \
    EXPORT int name(void) {                                                                                            \
        errno = EOPNOTSUPP;                                                                                            \
        return EOPNOTSUPP;                                                                                             \
    }
#define REFUSED_POINTER(name)                                                                                          \
    EXPORT void *name(void);                                                                                           \
    EXPORT void *name(void) {                                                                                          \
        errno = EOPNOTSUPP;                                                                                            \
        return NULL;                                                                                                   \
    }
#define IGNORED(name)                                                                                                  \
    EXPORT void name(void);                                                                                            \
    EXPORT void name(void) {}

REFUSED_POINTER(_verbs_init_and_alloc_context)
REFUSED_POINTER(ibv_import_device)
REFUSED_POINTER(ibv_import_dm)
REFUSED_POINTER(ibv_import_mr)
REFUSED_POINTER(ibv_import_pd)
REFUSED_POINTER(verbs_open_device)

IGNORED(__verbs_log)
IGNORED(ibv_register_driver)
IGNORED(ibv_unimport_dm)
IGNORED(ibv_unimport_mr)
IGNORED(ibv_unimport_pd)
IGNORED(verbs_register_driver_34)
IGNORED(verbs_set_ops)
IGNORED(verbs_uninit_context)

REFUSED_INT(__ioctl_final_num_attrs)
REFUSED_INT(execute_ioctl)
REFUSED_INT(ibv_cmd_advise_mr)
REFUSED_INT(ibv_cmd_alloc_dm)
REFUSED_INT(ibv_cmd_alloc_mw)
REFUSED_INT(ibv_cmd_alloc_pd)
REFUSED_INT(ibv_cmd_attach_mcast)
REFUSED_INT(ibv_cmd_close_xrcd)
REFUSED_INT(ibv_cmd_create_ah)
REFUSED_INT(ibv_cmd_create_counters)
REFUSED_INT(ibv_cmd_create_cq)
REFUSED_INT(ibv_cmd_create_cq_ex)
REFUSED_INT(ibv_cmd_create_flow)
REFUSED_INT(ibv_cmd_create_flow_action_esp)
REFUSED_INT(ibv_cmd_create_qp)
REFUSED_INT(ibv_cmd_create_qp_ex)
REFUSED_INT(ibv_cmd_create_qp_ex2)
REFUSED_INT(ibv_cmd_create_rwq_ind_table)
REFUSED_INT(ibv_cmd_create_srq)
REFUSED_INT(ibv_cmd_create_srq_ex)
REFUSED_INT(ibv_cmd_create_wq)
REFUSED_INT(ibv_cmd_dealloc_mw)
REFUSED_INT(ibv_cmd_dealloc_pd)
REFUSED_INT(ibv_cmd_dereg_mr)
REFUSED_INT(ibv_cmd_destroy_ah)
REFUSED_INT(ibv_cmd_destroy_counters)
REFUSED_INT(ibv_cmd_destroy_cq)
REFUSED_INT(ibv_cmd_destroy_flow)
REFUSED_INT(ibv_cmd_destroy_flow_action)
REFUSED_INT(ibv_cmd_destroy_qp)
REFUSED_INT(ibv_cmd_destroy_rwq_ind_table)
REFUSED_INT(ibv_cmd_destroy_srq)
REFUSED_INT(ibv_cmd_destroy_wq)
REFUSED_INT(ibv_cmd_detach_mcast)
REFUSED_INT(ibv_cmd_free_dm)
REFUSED_INT(ibv_cmd_get_context)
REFUSED_INT(ibv_cmd_modify_cq)
REFUSED_INT(ibv_cmd_modify_flow_action_esp)
REFUSED_INT(ibv_cmd_modify_qp)
REFUSED_INT(ibv_cmd_modify_qp_ex)
REFUSED_INT(ibv_cmd_modify_srq)
REFUSED_INT(ibv_cmd_modify_wq)
REFUSED_INT(ibv_cmd_open_qp)
REFUSED_INT(ibv_cmd_open_xrcd)
REFUSED_INT(ibv_cmd_poll_cq)
REFUSED_INT(ibv_cmd_post_recv)
REFUSED_INT(ibv_cmd_post_send)
REFUSED_INT(ibv_cmd_post_srq_recv)
REFUSED_INT(ibv_cmd_query_context)
REFUSED_INT(ibv_cmd_query_device_any)
REFUSED_INT(ibv_cmd_query_mr)
REFUSED_INT(ibv_cmd_query_port)
REFUSED_INT(ibv_cmd_query_qp)
REFUSED_INT(ibv_cmd_query_srq)
REFUSED_INT(ibv_cmd_read_counters)
REFUSED_INT(ibv_cmd_reg_dm_mr)
REFUSED_INT(ibv_cmd_reg_dmabuf_mr)
REFUSED_INT(ibv_cmd_reg_mr)
REFUSED_INT(ibv_cmd_req_notify_cq)
REFUSED_INT(ibv_cmd_rereg_mr)
REFUSED_INT(ibv_cmd_resize_cq)
REFUSED_INT(ibv_read_ibdev_sysfs_file)
REFUSED_INT(verbs_init_cq)

EXPORT bool verbs_allow_disassociate_destroy;
bool verbs_allow_disassociate_destroy;
