/* Every device of the list, used as programs use it: what fails says why in errno, in whatever thread; waits can be
 * cancelled; and opening and closing leaves nothing behind. The argument is how many devices there are. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *device = "the list";

#define CHECK(what)                                                                                                    \
	do {                                                                                                           \
		if (!(what)) {                                                                                         \
			printf("%s, line %d: not so: %s (errno %d)\n", device, __LINE__, #what, errno);                \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

/* What fails must set errno, of the program's own C library. */
#define FAILS(call)                                                                                                    \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		CHECK((call) == NULL);                                                                                 \
		CHECK(errno != 0);                                                                                     \
	} while (0)

static void *failures(void *context)
{
	struct ibv_context *verbs = context;
	struct ibv_pd *pd = ibv_alloc_pd(verbs);
	CHECK(pd);
	struct ibv_cq *cq = ibv_create_cq(verbs, 16, NULL, NULL, 0);
	CHECK(cq);
	struct ibv_cq_init_attr_ex extended = {.cqe = 16, .wc_flags = ~0ull};
	struct ibv_qp_init_attr qp = {
		.qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq, .cap = {.max_send_wr = 1 << 30}};
	struct ibv_ah_attr ah = {.port_num = 99};
	FAILS(ibv_create_cq(verbs, 0x7fffffff, NULL, NULL, 0));
	FAILS(ibv_create_cq_ex(verbs, &extended));
	FAILS(ibv_reg_mr(pd, (void *)1, 1 << 20, IBV_ACCESS_LOCAL_WRITE));
	FAILS(ibv_create_qp(pd, &qp));
	FAILS(ibv_create_ah(pd, &ah));
	struct ibv_port_attr port;
	CHECK(ibv_query_port(verbs, 99, &port) != 0);
	CHECK(ibv_destroy_cq(cq) == 0);
	CHECK(ibv_dealloc_pd(pd) == 0);
	return NULL;
}

static void successes(struct ibv_context *verbs)
{
	struct ibv_device_attr attr;
	struct ibv_port_attr port;
	union ibv_gid gid;
	static char memory[4096];
	CHECK(ibv_query_device(verbs, &attr) == 0);
	CHECK(ibv_query_port(verbs, 1, &port) == 0 && port.state == IBV_PORT_ACTIVE);
	CHECK(ibv_query_gid(verbs, 1, 0, &gid) == 0);
	struct ibv_pd *pd = ibv_alloc_pd(verbs);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(verbs);
	CHECK(pd && channel);
	struct ibv_cq *cq = ibv_create_cq(verbs, 16, NULL, channel, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	CHECK(cq && mr && mr->context == verbs);
	struct ibv_srq_init_attr shared = {.attr = {.max_wr = 4, .max_sge = 1}};
	struct ibv_srq *srq = ibv_create_srq(pd, &shared);
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq, .srq = srq,
		.cap = {.max_send_wr = 4, .max_send_sge = 1}};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	CHECK(srq && qp);
	struct ibv_qp_attr to = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	CHECK(ibv_modify_qp(qp, &to, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	CHECK(ibv_query_qp(qp, &to, IBV_QP_STATE, &init) == 0 && to.qp_state == IBV_QPS_INIT);
	CHECK(ibv_destroy_qp(qp) == 0);
	CHECK(ibv_destroy_srq(srq) == 0);
	CHECK(ibv_dereg_mr(mr) == 0);
	CHECK(ibv_destroy_cq(cq) == 0);
	CHECK(ibv_destroy_comp_channel(channel) == 0);
	CHECK(ibv_dealloc_pd(pd) == 0);
}

/* The GID of 127.0.0.1, which is where both ends are. */
static int loopback(struct ibv_context *verbs, union ibv_gid *gid)
{
	static const uint8_t wanted[16] = {[10] = 0xff, 0xff, 127, 0, 0, 1};
	for (int index = 0; ibv_query_gid(verbs, 1, index, gid) == 0; index++)
		if (memcmp(gid->raw, wanted, sizeof wanted) == 0)
			return index;
	return -1;
}

static void connect_to(struct ibv_qp *qp, uint32_t number)
{
	struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = number, .max_dest_rd_atomic = 1,
		.min_rnr_timer = 12, .ah_attr = {.port_num = 1, .is_global = 1, .grh.hop_limit = 1}};
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
	int index = loopback(qp->context, &rtr.ah_attr.grh.dgid);
	CHECK(index >= 0);
	rtr.ah_attr.grh.sgid_index = index;
	CHECK(ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	CHECK(ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
	CHECK(ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

/* A message takes the receive that was one above the limit: an event of either kind, each to be acknowledged before
 * its object goes. */
static void events(struct ibv_context *verbs)
{
	struct ibv_pd *pd = ibv_alloc_pd(verbs);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(verbs);
	struct ibv_cq *cq = ibv_create_cq(verbs, 16, verbs, channel, 0);
	struct ibv_srq_init_attr shared = {.attr = {.max_wr = 4, .max_sge = 1}};
	struct ibv_srq *srq = ibv_create_srq(pd, &shared);
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq, .srq = srq,
		.cap = {.max_send_wr = 4, .max_send_sge = 1}};
	struct ibv_qp *qps[2] = {ibv_create_qp(pd, &init), ibv_create_qp(pd, &init)};
	CHECK(pd && channel && cq && srq && qps[0] && qps[1]);
	connect_to(qps[0], qps[1]->qp_num);
	connect_to(qps[1], qps[0]->qp_num);

	struct ibv_recv_wr receive = {.wr_id = 1}, *bad_receive;
	CHECK(ibv_post_srq_recv(srq, &receive, &bad_receive) == 0);
	struct ibv_srq_attr limit = {.srq_limit = 1};
	CHECK(ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT) == 0);
	CHECK(ibv_req_notify_cq(cq, 0) == 0);
	struct ibv_send_wr send = {.opcode = IBV_WR_SEND}, *bad_send;
	CHECK(ibv_post_send(qps[0], &send, &bad_send) == 0);

	struct ibv_cq *of;
	void *context;
	CHECK(ibv_get_cq_event(channel, &of, &context) == 0 && of == cq && context == verbs);
	ibv_ack_cq_events(of, 1);
	struct ibv_wc done;
	while (ibv_poll_cq(cq, 1, &done) == 0)
		;
	CHECK(done.status == IBV_WC_SUCCESS && done.opcode == IBV_WC_RECV && done.wr_id == 1);
	struct ibv_async_event event;
	CHECK(ibv_get_async_event(verbs, &event) == 0);
	CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
	ibv_ack_async_event(&event);

	CHECK(ibv_destroy_qp(qps[0]) == 0 && ibv_destroy_qp(qps[1]) == 0);
	CHECK(ibv_destroy_srq(srq) == 0);
	CHECK(ibv_destroy_cq(cq) == 0);
	CHECK(ibv_destroy_comp_channel(channel) == 0);
	CHECK(ibv_dealloc_pd(pd) == 0);
}

static void *wait_for_events(void *channel)
{
	struct ibv_cq *cq;
	void *context;
	ibv_get_cq_event(channel, &cq, &context);
	return NULL;
}

static void *wait_for_news(void *context)
{
	struct ibv_async_event event;
	ibv_get_async_event(context, &event);
	return NULL;
}

static void cancel(void *(*run)(void *), void *argument)
{
	pthread_t thread;
	void *result;
	CHECK(pthread_create(&thread, NULL, run, argument) == 0);
	CHECK(pthread_cancel(thread) == 0);
	CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
}

static void each(struct ibv_device *of)
{
	device = ibv_get_device_name(of);
	struct ibv_context *verbs = ibv_open_device(of);
	CHECK(verbs && verbs->device == of);
	successes(verbs);
	events(verbs);
	failures(verbs);
	pthread_t thread;
	CHECK(pthread_create(&thread, NULL, failures, verbs) == 0 && pthread_join(thread, NULL) == 0);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(verbs);
	CHECK(channel);
	cancel(wait_for_events, channel);
	cancel(wait_for_news, verbs);
	CHECK(ibv_destroy_comp_channel(channel) == 0);
	CHECK(ibv_close_device(verbs) == 0);
	printf("%s: as it should be\n", device);
}

static void open_and_close(int times, int wanted)
{
	for (; times > 0; times--) {
		int count;
		struct ibv_device **list = ibv_get_device_list(&count);
		CHECK(list && count == wanted);
		for (int i = 0; i < count; i++) {
			struct ibv_context *verbs = ibv_open_device(list[i]);
			struct ibv_pd *pd = verbs ? ibv_alloc_pd(verbs) : NULL;
			CHECK(pd && ibv_dealloc_pd(pd) == 0 && ibv_close_device(verbs) == 0);
		}
		ibv_free_device_list(list);
	}
}

int main(int argc, char **argv)
{
	int count, wanted = argc > 1 ? atoi(argv[1]) : 0;
	setlinebuf(stdout);
	CHECK(ibv_fork_init() == 0);
	struct ibv_device **list = ibv_get_device_list(&count);
	CHECK(list && count == wanted && list[count] == NULL);
	for (int i = 0; i < count; i++)
		each(list[i]);
	ibv_free_device_list(list);

	device = "the memory";
	open_and_close(10, wanted);
	size_t before = mallinfo2().uordblks;
	open_and_close(1000, wanted);
	size_t after = mallinfo2().uordblks;
	printf("%zu bytes in use before 1000 times, %zu after\n", before, after);
	// Less than the least that an allocation takes, each time. Threads of the device may hold a few of their own.
	CHECK(after < before + 1000 * 16);
	return 0;
}
