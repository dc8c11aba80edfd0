//! Members that do as they are told, and what polls make of them.

use std::cell::Cell;

use super::*;

/// A member whose completions are numbers.
#[derive(Default)]
struct Fake {
    index: usize,
    /// Completions that wait.
    waiting: Cell<u64>,
    handed_out: Cell<u64>,
    /// Something is under way that ends without a word.
    is_busy: Cell<bool>,
    rests: Cell<bool>,
    visits: Cell<u32>,
}

impl Visit for Fake {
    fn index(&self) -> usize {
        self.index
    }

    fn visit(&self, wcs: &mut [ibv_wc]) -> usize {
        assert!(!wcs.is_empty(), "a visit without room for completions");
        self.visits.set(self.visits.get() + 1);
        let count = wcs.len().min(self.waiting.get() as usize);
        for wc in &mut wcs[..count] {
            wc.wr_id = self.handed_out.get();
            wc.qp_num = self.index as u32;
            self.handed_out.set(wc.wr_id + 1);
        }
        self.waiting.set(self.waiting.get() - count as u64);
        count
    }

    fn is_quiet(&self) -> bool {
        !self.is_busy.get()
    }

    fn rest(&self, rests: bool) {
        self.rests.set(rests);
    }
}

struct Scene {
    crowd: Crowd,
    members: Vec<Fake>,
    calls: [Calls; 2],
}

impl Scene {
    fn new(count: usize) -> Self {
        let member = |place| Fake {
            // Not their places, and more than one word of calls.
            index: 7 + 40 * place,
            ..Fake::default()
        };
        let mut scene = Self {
            crowd: Crowd::new::<Fake>(&[]),
            members: Vec::new(),
            calls: [Calls::new(), Calls::new()],
        };
        for place in 0..count {
            scene.members.push(member(place));
            scene.crowd.join(&scene.members[place]);
        }
        scene
    }

    /// The indices of the members that completions came from.
    fn poll(&mut self, room: usize) -> Vec<usize> {
        let mut wcs = vec![ibv_wc::default(); room];
        let [own, peers] = &self.calls;
        let filled = self.crowd.poll(&self.members, [own, peers], &mut wcs);
        let from = wcs[..filled].iter();
        from.map(|wc| wc.qp_num as usize).collect()
    }

    /// A completion becomes visible, and its member says so if it must.
    fn complete(&self, place: usize) {
        let member = &self.members[place];
        member.waiting.set(member.waiting.get() + 1);
        if member.rests.get() {
            self.calls[place % 2].call(member.index);
        }
    }

    fn index(&self, place: usize) -> usize {
        self.members[place].index
    }

    fn active(&self) -> Vec<usize> {
        self.crowd.active().collect()
    }
}

#[test]
fn who_calls_is_visited_by_the_next_poll() {
    let mut scene = Scene::new(100);
    assert!(scene.members.iter().all(|member| member.rests.get()));
    for place in [3, 99, 0] {
        scene.complete(place);
        assert_eq!(scene.poll(4), [scene.index(place)]);
        assert!(!scene.members[place].rests.get());
    }
    assert_eq!(scene.active(), [3, 99, 0]);
}

#[test]
fn members_that_have_nothing_come_to_rest_and_come_back() {
    let mut scene = Scene::new(100);
    for round in 0..3 {
        scene.complete(40);
        assert_eq!(scene.poll(1), [scene.index(40)], "round {round}");
        let mut polls = 0;
        while !scene.active().is_empty() {
            assert_eq!(scene.poll(1), [0; 0]);
            polls += 1;
        }
        // It is visited for a while after it was said to rest.
        assert!(scene.members[40].rests.get());
        assert!(polls > 2 * MOST_PATIENCE, "after {polls} polls");
        assert!(polls < 4 * MOST_PATIENCE, "after {polls} polls");
    }
}

/// It has been said to rest, and what came just before that went without a call.
#[test]
fn a_completion_without_a_call_is_found_before_its_member_rests() {
    let mut scene = Scene::new(100);
    scene.complete(8);
    scene.poll(1);
    while !scene.members[8].rests.get() {
        assert_eq!(scene.poll(1), [0; 0]);
    }
    scene.members[8].waiting.set(1);
    assert_eq!(scene.poll(1), [scene.index(8)]);
    assert!(!scene.members[8].rests.get());
}

#[test]
fn who_has_something_under_way_does_not_rest() {
    let mut scene = Scene::new(100);
    scene.members[8].is_busy.set(true);
    scene.calls[0].call(scene.index(8));
    for _ in 0..10 * MOST_PATIENCE {
        assert_eq!(scene.poll(1), [0; 0]);
    }
    assert_eq!(scene.active(), [8]);
    assert!(!scene.members[8].rests.get());
    scene.members[8].is_busy.set(false);
    while !scene.active().is_empty() {
        scene.poll(1);
    }
    assert!(scene.members[8].rests.get());
}

/// A member that always has something keeps neither the other active ones nor the resting ones waiting,
/// even where each poll takes one completion.
#[test]
fn nobody_is_kept_waiting() {
    let mut scene = Scene::new(40);
    for place in [1, 2, 3] {
        scene.complete(place);
    }
    scene.members[1].waiting.set(1_000_000);
    let found: Vec<_> = (0..5).flat_map(|_| scene.poll(1)).collect();
    for place in [2, 3] {
        assert!(found.contains(&scene.index(place)), "{found:?}");
    }
    // Nobody was told of this.
    scene.members[30].waiting.set(1);
    let most = (SELDOM as usize + 1) * scene.members.len();
    let polls = (0..most).position(|_| scene.poll(1) == [scene.index(30)]);
    assert!(polls.is_some());
    assert!(scene.active().contains(&30));
}

/// A poll that asks for nothing says nothing about anybody.
#[test]
fn polls_without_room_bring_nobody_to_rest() {
    let mut scene = Scene::new(40);
    scene.complete(30);
    assert_eq!(scene.poll(1), [scene.index(30)]);
    scene.members[30].waiting.set(1);
    for _ in 0..10 * MOST_PATIENCE {
        assert_eq!(scene.poll(0), [0; 0]);
    }
    assert_eq!(scene.poll(1), [scene.index(30)]);
}

#[test]
fn a_quiet_crowd_finds_what_it_was_not_told_of() {
    let mut scene = Scene::new(40);
    scene.members[30].waiting.set(1);
    let most = (SELDOM / FRUITLESS + 1) as usize * scene.members.len();
    let polls = (0..most).position(|_| scene.poll(1) == [scene.index(30)]);
    assert!(polls.is_some());
}

/// What the arming of a queue asks for.
#[test]
fn everybody_is_visited_before_a_poll_finds_nothing() {
    let mut scene = Scene::new(100);
    scene.complete(50);
    assert_eq!(scene.poll(1), [scene.index(50)]);
    for place in [0, 20, 50, 99] {
        scene.members[place].waiting.set(3);
    }
    scene.crowd.visit_everybody();
    let mut found = Vec::new();
    loop {
        let more = scene.poll(2);
        if more.is_empty() {
            break;
        }
        found.extend(more);
    }
    found.sort_unstable();
    let wanted: Vec<_> = [0, 20, 50, 99]
        .iter()
        .flat_map(|place| [scene.index(*place); 3])
        .collect();
    assert_eq!(found, wanted);
}

/// The last takes the place of one that has had its turn.
#[test]
fn everybody_is_visited_although_somebody_leaves_meanwhile() {
    let mut scene = Scene::new(10);
    for place in [4, 9] {
        scene.members[place].waiting.set(1);
    }
    scene.crowd.visit_everybody();
    assert_eq!(scene.poll(1), [scene.index(4)]);
    let (last, gone) = (scene.index(9), scene.members.swap_remove(4));
    scene.crowd.leave(&scene.members, 4, &gone);
    assert_eq!(scene.poll(1), [last]);
}

#[test]
fn members_come_and_go() {
    let mut scene = Scene::new(30);
    for place in [4, 29, 17] {
        scene.complete(place);
    }
    assert_eq!(scene.poll(8).len(), 3);
    let gone = scene.members.swap_remove(4);
    scene.crowd.leave(&scene.members, 4, &gone);
    // The last has moved there.
    assert_eq!(scene.index(4), 7 + 40 * 29);
    assert_eq!(scene.active(), [17, 4]);
    let last = scene.members.pop().expect("29 are left");
    scene.crowd.leave(&scene.members, 28, &last);
    // A late call for one that has gone, and nonsense.
    scene.calls[1].call(gone.index);
    scene.calls[1].call(last.index);
    scene.calls[1].call(16_000);
    assert_eq!(scene.poll(8), [0; 0]);
    for place in 0..scene.members.len() {
        scene.complete(place);
    }
    let mut found = scene.poll(64);
    found.sort_unstable();
    let mut wanted: Vec<_> = scene.members.iter().map(|member| member.index).collect();
    wanted.sort_unstable();
    assert_eq!(found, wanted);
}

/// Random traffic: each completion comes once, and with the next polls that have room for it.
#[test]
fn random_traffic_is_handed_out() {
    let mut scene = Scene::new(200);
    let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
    let mut random = |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % below) as usize
    };
    let (mut sent, mut found) = (0, 0);
    for _ in 0..50_000 {
        for _ in 0..random(4) {
            scene.complete(random(200));
            sent += 1;
        }
        if random(2000) == 0 {
            scene.crowd.visit_everybody();
        }
        if random(3) > 0 {
            found += scene.poll(1 + random(16)).len();
        } else {
            // With room for all nothing is left.
            found += scene.poll(1024).len();
            assert_eq!(found, sent);
        }
        assert!(scene.crowd.active.len() <= scene.members.len());
    }
    // Fewer than all were visited.
    let visits: u32 = scene.members.iter().map(|member| member.visits.get()).sum();
    assert!(visits < 50_000 * 75, "{visits} visits");
}
