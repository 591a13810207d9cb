/* Sends a message of so many bytes, and prints the status of its completion: hole BYTES [gone]. With the latter, the
 * peer is no more. */
#include "pair.h"

int main(int argc, char **argv) {
    struct pair pair = make_pair(open_first());
    struct ibv_sge part = {(uintptr_t)pair.memory, SIZE, pair.mr->lkey};
    struct ibv_recv_wr receive = {.sg_list = &part, .num_sge = 1}, *bad_receive;
    struct ibv_send_wr send = {.sg_list = &part, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
    struct ibv_wc wc = {0};
    CHECK(!ibv_post_recv(pair.qps[1], &receive, &bad_receive));
    if (argc > 2)
        CHECK(!ibv_destroy_qp(pair.qps[1]));
    part.length = (uint32_t)atoi(argv[1]);
    CHECK(!ibv_post_send(pair.qps[0], &send, &bad));
    do
        CHECK(ibv_poll_cq(pair.cq, 1, &wc) >= 0);
    while (wc.qp_num != pair.qps[0]->qp_num);
    puts(ibv_wc_status_str(wc.status));
    return 0;
}
