/*
 * Every way in which a connection does not come about, or ends, with both sides in processes of their own; the calls that
 * wait by themselves; and the calls that are not supported.
 *
 *     endings
 */
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <rdma/rdma_verbs.h>
#include <rdma/rsocket.h>

#include "common.h"

/* Reasons of a rejection, by which programs tell one from another. */
enum { NOBODY_LISTENS = 8, REFUSED = 28 };

static const char LOOPBACK[] = "127.0.0.1";

extern char **environ;

/* Another process of this program, which does one thing to who listens at a port. */
static pid_t peer(const char *task, const struct rdma_cm_id *listening)
{
	char port[8];
	char *arguments[] = { "endings", (char *)task, port, NULL };
	pid_t pid;

	snprintf(port, sizeof(port), "%d", ntohs(rdma_get_src_port((struct rdma_cm_id *)listening)));
	CHECK(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, arguments, environ) == 0);
	return pid;
}

static void ended_well(pid_t pid)
{
	int status;

	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void die(pid_t pid)
{
	int status;

	CHECK(kill(pid, SIGKILL) == 0);
	CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
}

/* The identifier of a request, which is acknowledged. */
static struct rdma_cm_id *requested(struct rdma_event_channel *channel)
{
	struct rdma_cm_event *event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	struct rdma_cm_id *id = event->id;

	CHECK(rdma_ack_cm_event(event) == 0);
	create_qp(id);
	return id;
}

static void destroy(struct rdma_cm_id *id)
{
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0);
}

static struct rdma_conn_param parameters(void)
{
	return (struct rdma_conn_param){ .responder_resources = 1, .initiator_depth = 1, .retry_count = 7 };
}

/* One that has asked who listens at a port. */
static struct rdma_cm_id *asking(struct rdma_event_channel *channel, int port)
{
	struct rdma_conn_param param = parameters();
	struct rdma_cm_id *id = resolved(channel, address_of(LOOPBACK, port));

	create_qp(id);
	CHECK(rdma_connect(id, &param) == 0);
	return id;
}

/* Has a queue pair, for which a receive is posted, in the error state. */
static void is_flushed(struct rdma_cm_id *id)
{
	struct ibv_wc wc;

	CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_WR_FLUSH_ERR);
}

static void nobody_listens(struct rdma_event_channel *channel)
{
	struct sockaddr_in any = address_of(LOOPBACK, 0);
	struct rdma_cm_id *bound, *id;

	CHECK(rdma_create_id(channel, &bound, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(bound, (struct sockaddr *)&any) == 0);
	id = asking(channel, ntohs(rdma_get_src_port(bound)));
	pass(channel, RDMA_CM_EVENT_REJECTED, NOBODY_LISTENS);
	destroy(id);
	CHECK(rdma_destroy_id(bound) == 0);
}

static void rejected(struct rdma_event_channel *channel, struct rdma_cm_id *listening)
{
	unsigned char private[17];
	pid_t other = peer("be-rejected", listening);
	struct rdma_cm_id *id = requested(channel);

	fill(private, sizeof(private), 1);
	CHECK(rdma_reject(id, private, sizeof(private)) == 0);
	ended_well(other);
	destroy(id);
}

static void be_rejected(struct rdma_event_channel *channel, int port)
{
	struct rdma_cm_id *id = asking(channel, port);
	struct rdma_cm_event *event = expect(channel, RDMA_CM_EVENT_REJECTED, REFUSED);

	CHECK(brings(event, 17, 1, REJECT_PRIVATE));
	CHECK(rdma_ack_cm_event(event) == 0);
	destroy(id);
}

/* Who was asked is gone before it has answered. */
static void destroyed_before_accepted(struct rdma_event_channel *channel, struct rdma_cm_id *listening)
{
	pid_t other = peer("be-refused", listening);

	destroy(requested(channel));
	ended_well(other);
}

static void be_refused(struct rdma_event_channel *channel, int port)
{
	struct rdma_cm_id *id = asking(channel, port);

	pass(channel, RDMA_CM_EVENT_REJECTED, REFUSED);
	destroy(id);
}

/* Who has asked is gone before it is answered; that, who was asked learns by no event of a connection. */
static void killed_before_accepted(struct rdma_event_channel *channel, struct rdma_cm_id *listening)
{
	struct rdma_conn_param param = parameters();
	pid_t other = peer("ask", listening);
	struct rdma_cm_id *id = requested(channel);
	struct rdma_cm_event *event;

	die(other);
	CHECK(rdma_get_cm_event(channel, &event) == 0);
	CHECK(event->id == id && event->event == RDMA_CM_EVENT_REJECTED);
	CHECK(rdma_ack_cm_event(event) == 0);
	CHECK(rdma_accept(id, &param) == -1 && errno == EINVAL);
	destroy(id);
}

/* A connected one is gone: a disconnection, and what waits is flushed once this side has disconnected, too. */
static void killed_when_connected(struct rdma_event_channel *channel, struct rdma_cm_id *listening)
{
	struct rdma_conn_param param = parameters();
	pid_t other = peer("ask", listening);
	struct rdma_cm_id *id = requested(channel);
	struct ibv_mr *mr;
	char place[16];

	CHECK((mr = rdma_reg_msgs(id, place, sizeof(place))));
	CHECK(rdma_post_recv(id, NULL, place, sizeof(place), mr) == 0);
	CHECK(rdma_accept(id, &param) == 0);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	die(other);
	pass(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	CHECK(rdma_disconnect(id) == 0);
	is_flushed(id);
	CHECK(rdma_dereg_mr(mr) == 0);
	destroy(id);
}

/* Asks, and waits for its own end. */
static void ask(struct rdma_event_channel *channel, int port)
{
	asking(channel, port);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	for (;;)
		pause();
}

/* A connected one is destroyed without a word. */
static void destroyed_when_connected(struct rdma_event_channel *channel, struct rdma_cm_id *listening)
{
	struct rdma_conn_param param = parameters();
	pid_t other = peer("be-left", listening);
	struct rdma_cm_id *id = requested(channel);

	CHECK(rdma_accept(id, &param) == 0);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	destroy(id);
	ended_well(other);
}

static void be_left(struct rdma_event_channel *channel, int port)
{
	struct rdma_cm_id *id = asking(channel, port);

	pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	pass(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	/* What says that the connection's numbers can be used again. */
	pass(channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	destroy(id);
}

/* An end point of rdma_create_ep(3), whose calls wait by themselves. */
static struct rdma_cm_id *end_point(int flags, int port)
{
	char service[8];
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_port_space = RDMA_PS_TCP }, *found;
	struct ibv_qp_init_attr init = {
		.sq_sig_all = 1,
		.cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct rdma_cm_id *id;

	snprintf(service, sizeof(service), "%d", port);
	CHECK(rdma_getaddrinfo(LOOPBACK, service, &hints, &found) == 0);
	CHECK(rdma_create_ep(&id, found, NULL, &init) == 0);
	rdma_freeaddrinfo(found);
	return id;
}

static void synchronous(void)
{
	struct rdma_cm_id *listening = end_point(RAI_PASSIVE, 0), *id;
	unsigned char private[5];
	pid_t other;

	CHECK(rdma_listen(listening, 2) == 0);
	other = peer("synchronous", listening);
	/* The first is rejected, the second accepted. */
	CHECK(rdma_get_request(listening, &id) == 0 && id->qp);
	CHECK(id->event && id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	fill(private, sizeof(private), 2);
	CHECK(rdma_reject(id, private, sizeof(private)) == 0);
	rdma_destroy_ep(id);
	CHECK(rdma_get_request(listening, &id) == 0 && id->qp);
	CHECK(rdma_accept(id, NULL) == 0);
	CHECK(rdma_disconnect(id) == 0);
	rdma_destroy_ep(id);
	ended_well(other);
	rdma_destroy_ep(listening);
}

static void ask_synchronously(int port)
{
	struct rdma_cm_id *id = end_point(0, port);

	CHECK(rdma_connect(id, NULL) == -1 && errno == ECONNREFUSED);
	CHECK(id->event->status == REFUSED && brings(id->event, 5, 2, REJECT_PRIVATE));
	rdma_destroy_ep(id);
	id = end_point(0, port);
	CHECK(rdma_connect(id, NULL) == 0);
	CHECK(rdma_disconnect(id) == 0);
	rdma_destroy_ep(id);
}

static void unsupported(struct rdma_cm_id *id)
{
	struct sockaddr_in group = address_of("239.0.0.1", 0);
	struct rdma_cm_join_mc_attr_ex attr = { .comp_mask = 0 };

	CHECK(rdma_join_multicast(id, (struct sockaddr *)&group, NULL) == -1 && errno == EOPNOTSUPP);
	errno = 0;
	CHECK(rdma_join_multicast_ex(id, &attr, NULL) == -1 && errno == EOPNOTSUPP);
	errno = 0;
	CHECK(rdma_leave_multicast(id, (struct sockaddr *)&group) == -1 && errno == EOPNOTSUPP);
	errno = 0;
	CHECK(rsocket(AF_INET, SOCK_STREAM, 0) == -1 && errno == EOPNOTSUPP);
	errno = 0;
	CHECK(rpoll(NULL, 0, 0) == -1 && errno == EOPNOTSUPP);
	errno = 0;
	CHECK(rrecv(0, NULL, 0, 0) == -1 && errno == EOPNOTSUPP);
	errno = 0;
	CHECK(riowrite(0, NULL, 0, 0, 0) == 0 && errno == EOPNOTSUPP);
}

int main(int argc, char **argv)
{
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listening;
	int port = argc > 2 ? atoi(argv[2]) : 0;

	CHECK((channel = rdma_create_event_channel()));
	if (argc > 2) {
		const char *task = argv[1];

		end_with_parent();
		if (strcmp(task, "be-rejected") == 0)
			be_rejected(channel, port);
		else if (strcmp(task, "be-refused") == 0)
			be_refused(channel, port);
		else if (strcmp(task, "be-left") == 0)
			be_left(channel, port);
		else if (strcmp(task, "ask") == 0)
			ask(channel, port);
		else
			ask_synchronously(port);
		rdma_destroy_event_channel(channel);
		return 0;
	}
	listening = listener(channel, address_of(LOOPBACK, 0));
	nobody_listens(channel);
	rejected(channel, listening);
	destroyed_before_accepted(channel, listening);
	killed_before_accepted(channel, listening);
	killed_when_connected(channel, listening);
	destroyed_when_connected(channel, listening);
	synchronous();
	unsupported(listening);
	CHECK(rdma_destroy_id(listening) == 0);
	rdma_destroy_event_channel(channel);
	puts("every ending is as it should be");
	return 0;
}
