/*
 * Threads that wait for events can be cancelled, as in a system call of the C library, and what they waited for goes on.
 *
 *     cancel
 */
#include <pthread.h>

#include "common.h"

enum { ROUNDS = 20 };

static struct rdma_event_channel *channel;
static struct ibv_comp_channel *completions;
static struct rdma_cm_id *listening;

/* Whether the thread is about to wait. */
static int ready;

static void *wait_for_connections(void *unused)
{
	struct rdma_cm_event *event;

	(void)unused;
	__atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
	rdma_get_cm_event(channel, &event);
	return NULL;
}

static void *wait_for_completions(void *unused)
{
	struct ibv_cq *cq;
	void *context;

	(void)unused;
	__atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
	ibv_get_cq_event(completions, &cq, &context);
	return NULL;
}

static void *wait_for_trouble(void *unused)
{
	struct ibv_async_event event;

	(void)unused;
	__atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
	ibv_get_async_event(completions->context, &event);
	return NULL;
}

/* Whether a thread seems to sleep, so that most rounds of the second kind cancel one that does. */
static int sleeps(pthread_t thread)
{
	clockid_t clock;
	struct timespec before, after;

	if (pthread_getcpuclockid(thread, &clock))
		return 1;
	CHECK(clock_gettime(clock, &before) == 0);
	sched_yield();
	CHECK(clock_gettime(clock, &after) == 0);
	return before.tv_sec == after.tv_sec && before.tv_nsec == after.tv_nsec;
}

static void is_cancelled(void *(*wait)(void *), int asleep)
{
	pthread_t thread;
	void *result;

	ready = 0;
	CHECK(pthread_create(&thread, NULL, wait, NULL) == 0);
	while (asleep && !(__atomic_load_n(&ready, __ATOMIC_ACQUIRE) && sleeps(thread)))
		;
	CHECK(pthread_cancel(thread) == 0);
	CHECK(pthread_join(thread, &result) == 0);
	CHECK(result == PTHREAD_CANCELED);
}

int main(void)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct rdma_event_channel *other;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct ibv_context **devices;
	struct ibv_cq *cq;

	CHECK((channel = rdma_create_event_channel()) && (other = rdma_create_event_channel()));
	CHECK((devices = rdma_get_devices(NULL)));
	CHECK((completions = ibv_create_comp_channel(devices[0])));
	CHECK((cq = ibv_create_cq(devices[0], 1, NULL, completions, 0)));
	listening = listener(channel, address_of("127.0.0.1", 0));
	for (int round = 0; round < ROUNDS; round++) {
		is_cancelled(wait_for_connections, round % 2);
		is_cancelled(wait_for_completions, round % 2);
		is_cancelled(wait_for_trouble, round % 2);
	}
	/* Others get what they did not wait for. */
	id = resolved(other, address_of("127.0.0.1", ntohs(rdma_get_src_port(listening))));
	create_qp(id);
	CHECK(rdma_connect(id, &param) == 0);
	event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	CHECK(rdma_destroy_id(event->id) == 0 && rdma_ack_cm_event(event) == 0);
	pass(other, RDMA_CM_EVENT_REJECTED, 28);
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0 && rdma_destroy_id(listening) == 0);
	CHECK(ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(completions) == 0);
	rdma_free_devices(devices);
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(other);
	puts("all were cancelled");
	return 0;
}
