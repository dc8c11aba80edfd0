/*
 * Many threads of one process, which has both ends of every connection: some take the events of one channel between them,
 * whichever comes to whom; each of the others has a channel of its own, and connects again and again.
 *
 *     threads CLIENTS CYCLES
 */
#include <pthread.h>
#include <sched.h>

#include <rdma/rdma_verbs.h>

#include "common.h"

enum { SERVERS = 3, MOST_CLIENTS = 64 };

/* What a request says: connect, or let a server end. */
enum { CONNECT = 1, STOP = 2 };

static struct rdma_event_channel *serving;
static struct sockaddr_in address;
static unsigned cycles;
static unsigned established, disconnected;

static void *serve(void *unused)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	int stopped = 0;

	(void)unused;
	while (!stopped) {
		struct rdma_cm_event *event;
		struct rdma_cm_id *id;
		enum rdma_cm_event_type kind;

		CHECK(rdma_get_cm_event(serving, &event) == 0 && event->status == 0);
		id = event->id;
		kind = event->event;
		if (kind == RDMA_CM_EVENT_CONNECT_REQUEST) {
			stopped = *(const char *)event->param.conn.private_data == STOP;
			if (stopped) {
				CHECK(rdma_reject(id, NULL, 0) == 0);
			} else {
				create_qp(id);
				CHECK(rdma_accept(id, &param) == 0);
			}
		} else if (kind == RDMA_CM_EVENT_ESTABLISHED) {
			__atomic_add_fetch(&established, 1, __ATOMIC_RELAXED);
		} else if (kind == RDMA_CM_EVENT_DISCONNECTED) {
			CHECK(rdma_disconnect(id) == 0);
		} else {
			/* Comes a second after the disconnection, if the thread that has that one's event is so slow. */
			CHECK(kind == RDMA_CM_EVENT_TIMEWAIT_EXIT);
		}
		CHECK(rdma_ack_cm_event(event) == 0);
		if (kind == RDMA_CM_EVENT_DISCONNECTED) {
			/* Another thread may still have the event before this one; this waits for it. */
			rdma_destroy_qp(id);
			CHECK(rdma_destroy_id(id) == 0);
			__atomic_add_fetch(&disconnected, 1, __ATOMIC_RELAXED);
		} else if (stopped) {
			CHECK(rdma_destroy_id(id) == 0);
		}
	}
	return NULL;
}

static struct rdma_cm_id *asking(struct rdma_event_channel *channel, char what)
{
	struct rdma_conn_param param = {
		.private_data = &what,
		.private_data_len = 1,
		.responder_resources = 1,
		.initiator_depth = 1,
		.retry_count = 7,
	};
	struct rdma_cm_id *id = resolved(channel, address);

	create_qp(id);
	CHECK(rdma_connect(id, &param) == 0);
	return id;
}

static void *ask(void *unused)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();

	(void)unused;
	CHECK(channel);
	for (unsigned cycle = 0; cycle < cycles; cycle++) {
		struct rdma_cm_id *id = asking(channel, CONNECT);

		pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
		/* Every third goes without a word. */
		if (cycle % 3) {
			CHECK(rdma_disconnect(id) == 0);
			pass(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
		}
		rdma_destroy_qp(id);
		CHECK(rdma_destroy_id(id) == 0);
	}
	rdma_destroy_event_channel(channel);
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t servers[SERVERS], clients[MOST_CLIENTS];
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listening;
	unsigned count, all;
	int before;

	CHECK(argc == 3);
	count = strtoul(argv[1], NULL, 10);
	cycles = strtoul(argv[2], NULL, 10);
	CHECK(count <= MOST_CLIENTS);
	all = count * cycles;
	CHECK((serving = rdma_create_event_channel()) && (channel = rdma_create_event_channel()));
	listening = listener(serving, address_of("127.0.0.1", 0));
	address = address_of("127.0.0.1", ntohs(rdma_get_src_port(listening)));
	for (int at = 0; at < SERVERS; at++)
		CHECK(pthread_create(&servers[at], NULL, serve, NULL) == 0);
	before = count_descriptors();
	for (unsigned at = 0; at < count; at++)
		CHECK(pthread_create(&clients[at], NULL, ask, NULL) == 0);
	for (unsigned at = 0; at < count; at++)
		CHECK(pthread_join(clients[at], NULL) == 0);
	/* The last ones may still be on their way to the servers. */
	while (__atomic_load_n(&disconnected, __ATOMIC_RELAXED) < all)
		sched_yield();
	for (int at = 0; at < SERVERS; at++) {
		struct rdma_cm_id *id = asking(channel, STOP);

		pass(channel, RDMA_CM_EVENT_REJECTED, 28);
		rdma_destroy_qp(id);
		CHECK(rdma_destroy_id(id) == 0);
	}
	for (int at = 0; at < SERVERS; at++)
		CHECK(pthread_join(servers[at], NULL) == 0);
	CHECK(established == all && disconnected == all);
	while (count_descriptors() > before)
		sched_yield();
	CHECK(rdma_destroy_id(listening) == 0);
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(serving);
	printf("%u connections by %u threads\n", all, count);
	return 0;
}
