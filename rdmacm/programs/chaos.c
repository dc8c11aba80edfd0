/*
 * Calls in any order, on identifiers in any state, by several threads that are each other's peers. Nothing is expected
 * of a single call but that it returns; of all, that everything can be destroyed at any moment, and that then no
 * descriptor is left.
 *
 *     chaos SEED STEPS
 */
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>

#include "common.h"

enum { THREADS = 4, IDS = 12, EVENTS = 8, PORTS = 6 };

/* Ports that the threads listen at and connect to. */
static int ports[PORTS];
static unsigned seed, steps;
static unsigned long connections, refusals;

struct side {
	unsigned long random;
	struct rdma_event_channel *channel;
	struct rdma_cm_id *ids[IDS];
	/* Events that are acknowledged late. */
	struct rdma_cm_event *events[EVENTS];
};

static unsigned draw(struct side *side, unsigned below)
{
	side->random = side->random * 6364136223846793005ul + 1442695040888963407ul;
	return (unsigned)(side->random >> 33) % below;
}

static struct sockaddr_in somewhere(struct side *side)
{
	return address_of("127.0.0.1", ports[draw(side, PORTS)]);
}

/* Acknowledges what is about an identifier, or everything. */
static void acknowledge(struct side *side, const struct rdma_cm_id *id)
{
	for (int at = 0; at < EVENTS; at++) {
		struct rdma_cm_event *event = side->events[at];

		if (event && (!id || event->id == id || event->listen_id == id)) {
			CHECK(rdma_ack_cm_event(event) == 0);
			side->events[at] = NULL;
		}
	}
}

static void destroy(struct side *side, int at)
{
	struct rdma_cm_id *id = side->ids[at];

	if (!id)
		return;
	/* It would wait for them for ever. */
	acknowledge(side, id);
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0);
	side->ids[at] = NULL;
}

static void keep(struct side *side, struct rdma_cm_id *id)
{
	int at = draw(side, IDS);

	destroy(side, at);
	side->ids[at] = id;
}

static struct rdma_conn_param parameters(struct side *side)
{
	static const unsigned char private[255] = { 7 };

	return (struct rdma_conn_param){
		.private_data = private,
		/* Seldom too much. */
		.private_data_len = draw(side, 57) + draw(side, 8) / 7 * draw(side, 199),
		.responder_resources = draw(side, 3),
		.initiator_depth = draw(side, 3),
	};
}

static void equip(struct rdma_cm_id *id)
{
	if (id->verbs && !id->qp)
		create_qp(id);
}

/* Any call. Many are wrong for what they are made on, and fail. */
static void call(struct side *side, struct rdma_cm_id *id)
{
	struct sockaddr_in address = somewhere(side);
	struct rdma_conn_param param = parameters(side);
	struct ibv_qp_attr attr = { .qp_state = draw(side, 6) };
	int mask;

	switch (draw(side, 10)) {
	case 0: rdma_bind_addr(id, (struct sockaddr *)&address); break;
	case 1: rdma_listen(id, draw(side, 4)); break;
	case 2: rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 100); break;
	case 3: rdma_resolve_route(id, 100); break;
	case 4: equip(id); break;
	case 5: rdma_connect(id, &param); break;
	case 6: rdma_accept(id, &param); break;
	case 7: rdma_reject(id, param.private_data, param.private_data_len); break;
	case 8: rdma_disconnect(id); break;
	default: rdma_init_qp_attr(id, &attr, &mask); break;
	}
}

/* What an event asks for. */
static void react(struct side *side, const struct rdma_cm_event *event)
{
	struct rdma_conn_param param = parameters(side);
	struct rdma_cm_id *id = event->id;

	switch (event->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED: rdma_resolve_route(id, 100); break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED: equip(id); rdma_connect(id, &param); break;
	case RDMA_CM_EVENT_CONNECT_REQUEST: equip(id); rdma_accept(id, &param); break;
	case RDMA_CM_EVENT_DISCONNECTED: rdma_disconnect(id); break;
	default: break;
	}
}

static void look(struct side *side)
{
	struct rdma_cm_event *event;
	int place = draw(side, EVENTS);

	if (rdma_get_cm_event(side->channel, &event)) {
		CHECK(errno == EAGAIN);
		return;
	}
	if (event->event == RDMA_CM_EVENT_ESTABLISHED)
		__atomic_add_fetch(&connections, 1, __ATOMIC_RELAXED);
	if (event->event == RDMA_CM_EVENT_REJECTED)
		__atomic_add_fetch(&refusals, 1, __ATOMIC_RELAXED);
	if (side->events[place])
		CHECK(rdma_ack_cm_event(side->events[place]) == 0);
	side->events[place] = event;
	if (draw(side, 6))
		react(side, event);
	if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST)
		keep(side, event->id);
}

static void step(struct side *side)
{
	int at = draw(side, IDS);
	struct rdma_cm_id *id = side->ids[at];
	struct sockaddr_in address = somewhere(side);

	if (id) {
		if (draw(side, 6) == 0)
			destroy(side, at);
		else if (draw(side, 2))
			call(side, id);
		return;
	}
	CHECK(rdma_create_id(side->channel, &id, NULL, RDMA_PS_TCP) == 0);
	side->ids[at] = id;
	if (draw(side, 3))
		rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 100);
	else if (rdma_bind_addr(id, (struct sockaddr *)&address) == 0)
		rdma_listen(id, draw(side, 4));
}

static void *run(void *argument)
{
	struct side side = { .random = seed * 1000003ul + (unsigned long)argument };

	CHECK((side.channel = rdma_create_event_channel()));
	CHECK(fcntl(side.channel->fd, F_SETFL, O_NONBLOCK) == 0);
	for (unsigned count = 0; count < steps; count++) {
		step(&side);
		look(&side);
	}
	acknowledge(&side, NULL);
	for (int at = 0; at < IDS; at++)
		destroy(&side, at);
	rdma_destroy_event_channel(side.channel);
	return NULL;
}

int main(int argc, char **argv)
{
	struct rdma_event_channel *channel;
	pthread_t threads[THREADS];
	struct rdma_cm_id *id;
	int before;

	CHECK(argc == 3);
	seed = strtoul(argv[1], NULL, 10);
	steps = strtoul(argv[2], NULL, 10);
	CHECK((channel = rdma_create_event_channel()));
	for (int at = 0; at < PORTS; at++) {
		id = listener(channel, address_of("127.0.0.1", 0));
		ports[at] = ntohs(rdma_get_src_port(id));
		CHECK(rdma_destroy_id(id) == 0);
	}
	before = count_descriptors();
	for (long at = 0; at < THREADS; at++)
		CHECK(pthread_create(&threads[at], NULL, run, (void *)at) == 0);
	for (int at = 0; at < THREADS; at++)
		CHECK(pthread_join(threads[at], NULL) == 0);
	while (count_descriptors() > before)
		sched_yield();
	rdma_destroy_event_channel(channel);
	printf("%lu sides connected, %lu refusals, nothing is left\n", connections, refusals);
	return 0;
}
