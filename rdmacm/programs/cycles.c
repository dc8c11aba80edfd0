/*
 * Connections by the thousand: made, used for a message, and ended, with private data each way. Descriptors are as many
 * at the end as after the first.
 *
 *     cycles server ADDRESS PORT COUNT
 *     cycles client ADDRESS PORT COUNT
 */
#include <sched.h>

#include <rdma/rdma_verbs.h>

#include "common.h"

static struct rdma_event_channel *channel;
/* Descriptors after the first cycle: some stay as long as the process. */
static int descriptors;

static void count_from(unsigned cycle)
{
	if (cycle == 0)
		descriptors = count_descriptors();
}

/* Sockets are closed by the library's thread, which may take its time. */
static void count_back(void)
{
	while (count_descriptors() > descriptors)
		sched_yield();
}

static void receive(struct rdma_cm_id *id, unsigned *place, struct ibv_mr **mr)
{
	CHECK((*mr = rdma_reg_msgs(id, place, sizeof(*place))));
	CHECK(rdma_post_recv(id, NULL, place, sizeof(*place), *mr) == 0);
}

static void end(struct rdma_cm_id *id, struct ibv_mr *mr)
{
	rdma_destroy_qp(id);
	CHECK(rdma_dereg_mr(mr) == 0);
	CHECK(rdma_destroy_id(id) == 0);
}

static void serve(struct sockaddr_in at, unsigned count)
{
	struct rdma_cm_id *listening = listener(channel, at);

	for (unsigned cycle = 0; cycle < count; cycle++) {
		struct rdma_cm_event *event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
		struct rdma_cm_id *id = event->id;
		unsigned char private[REPLY_PRIVATE];
		unsigned message = 0;
		struct ibv_mr *mr;
		struct ibv_wc wc;
		struct rdma_conn_param param = {
			.private_data = private,
			.private_data_len = cycle % (REPLY_PRIVATE + 1),
			.responder_resources = 1,
			.initiator_depth = 1,
		};

		CHECK(event->listen_id == listening);
		CHECK(brings(event, cycle % (REQUEST_PRIVATE + 1), cycle, REQUEST_PRIVATE));
		CHECK(rdma_ack_cm_event(event) == 0);
		create_qp(id);
		receive(id, &message, &mr);
		fill(private, param.private_data_len, cycle);
		CHECK(rdma_accept(id, &param) == 0);
		pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
		CHECK(rdma_get_recv_comp(id, &wc) == 1);
		CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == sizeof(message));
		CHECK(message == cycle);
		/* Either of the two may be the first to end it. */
		if (cycle % 2)
			CHECK(rdma_disconnect(id) == 0);
		pass(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		end(id, mr);
		count_from(cycle);
	}
	count_back();
	CHECK(rdma_destroy_id(listening) == 0);
}

static void ask(struct sockaddr_in to, unsigned count)
{
	for (unsigned cycle = 0; cycle < count; cycle++) {
		struct rdma_cm_id *id = resolved(channel, to);
		unsigned char private[REQUEST_PRIVATE];
		unsigned message = cycle;
		struct rdma_cm_event *event;
		struct ibv_mr *mr;
		struct ibv_wc wc;
		struct rdma_conn_param param = {
			.private_data = private,
			.private_data_len = cycle % (REQUEST_PRIVATE + 1),
			.responder_resources = 1,
			.initiator_depth = 1,
			.retry_count = 7,
			.rnr_retry_count = 7,
		};

		create_qp(id);
		CHECK((mr = rdma_reg_msgs(id, &message, sizeof(message))));
		fill(private, param.private_data_len, cycle);
		CHECK(rdma_connect(id, &param) == 0);
		event = expect(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
		CHECK(event->id == id);
		CHECK(brings(event, cycle % (REPLY_PRIVATE + 1), cycle, REPLY_PRIVATE));
		CHECK(rdma_ack_cm_event(event) == 0);
		CHECK(rdma_post_send(id, NULL, &message, sizeof(message), mr, 0) == 0);
		CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
		if (cycle % 2 == 0)
			CHECK(rdma_disconnect(id) == 0);
		pass(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		end(id, mr);
		count_from(cycle);
	}
	count_back();
}

int main(int argc, char **argv)
{
	struct sockaddr_in address;
	unsigned count;

	CHECK(argc == 5);
	address = address_of(argv[2], atoi(argv[3]));
	count = strtoul(argv[4], NULL, 10);
	CHECK((channel = rdma_create_event_channel()));
	if (strcmp(argv[1], "server") == 0)
		serve(address, count);
	else
		ask(address, count);
	rdma_destroy_event_channel(channel);
	printf("%u cycles, %d descriptors before and after\n", count, descriptors);
	return 0;
}
