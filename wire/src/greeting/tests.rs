use proptest::prelude::*;

use super::*;

fn hello() -> impl Strategy<Value = Hello> {
    let depths = (MIN_DEPTH..=MAX_DEPTH, MIN_MESSAGE_SIZE..=MAX_MESSAGE_SIZE);
    let numbers = (
        0..1u32 << 24,
        0..1u32 << 24,
        any::<[u8; 16]>(),
        any::<u16>(),
        1..=5u8,
    );
    let rest = (
        any::<u8>(),
        any::<u8>(),
        any::<u32>(),
        any::<u32>(),
        any::<bool>(),
    );
    (depths, numbers, rest).prop_map(
        |((recv_depth, message_size), (qp_num, psn, gid, lid, mtu), rest)| Hello {
            qp_num,
            psn,
            gid,
            lid,
            mtu,
            max_rd_atomic: rest.0,
            max_dest_rd_atomic: rest.1,
            recv_depth,
            message_size,
            application: rest.2,
            application_version: rest.3,
            software: rest.4,
        },
    )
}

fn greeting() -> impl Strategy<Value = Greeting> {
    prop_oneof![
        hello().prop_map(Greeting::Hello),
        Just(Greeting::Ready),
        Just(Greeting::Bye),
        (any::<u16>(), "\\PC{0,64}").prop_map(|(code, text)| Greeting::Reject {
            reason: RejectReason::from_code(code),
            text
        }),
    ]
}

proptest! {
    #[test]
    fn what_is_said_is_understood(greeting in greeting(), tail in prop::collection::vec(any::<u8>(), 0..20)) {
        let mut bytes = greeting.to_bytes();
        let len = bytes.len();
        prop_assert!(len <= MAX_FRAME);
        bytes.extend(tail);
        prop_assert_eq!(Greeting::parse(&bytes), Ok(Some((greeting, len))));
    }

    #[test]
    fn a_part_is_waited_for(greeting in greeting(), cut: prop::sample::Index) {
        let bytes = greeting.to_bytes();
        let part = &bytes[..cut.index(bytes.len())];
        prop_assert_eq!(Greeting::parse(part), Ok(None));
        let missing = Greeting::missing(part).unwrap();
        prop_assert!((1..=bytes.len() - part.len()).contains(&missing));
        prop_assert_eq!(Greeting::missing(&bytes), Ok(0));
    }

    #[test]
    fn damage_never_panics(
        greeting in greeting(), flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..5),
    ) {
        let mut bytes = greeting.to_bytes();
        for (at, mask) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= mask;
        }
        let _ = Greeting::parse(&bytes);
    }

    #[test]
    fn noise_is_an_error(bytes in prop::collection::vec(any::<u8>(), 4..200)) {
        prop_assume!(bytes[..4] != MAGIC);
        prop_assert!(Greeting::parse(&bytes).is_err());
    }
}

fn example() -> Hello {
    Hello {
        qp_num: 0x11,
        psn: 0x22,
        gid: [3; 16],
        lid: 0,
        mtu: 5,
        max_rd_atomic: 16,
        max_dest_rd_atomic: 16,
        recv_depth: 32,
        message_size: 4096,
        application: 0,
        application_version: 0,
        software: true,
    }
}

#[test]
fn another_version_is_named_and_its_rejection_understood() {
    let mut bytes = Greeting::Hello(example()).to_bytes();
    bytes[4] = 9;
    assert_eq!(
        Greeting::parse(&bytes),
        Err(GreetingError::Version { found: 9 })
    );
    let reject = Greeting::Reject {
        reason: RejectReason::Version,
        text: "too old".into(),
    };
    let mut bytes = reject.to_bytes();
    bytes[4] = 9;
    assert_eq!(Greeting::parse(&bytes), Ok(Some((reject, bytes.len()))));
}

/// Puts a value into a field that it cannot have.
type Damage = fn(&mut Hello);

#[test]
fn fields_out_of_range_are_named() {
    let cases: [(&str, Damage); 7] = [
        ("qp_num", |hello| hello.qp_num = 1 << 24),
        ("psn", |hello| hello.psn = u32::MAX),
        ("mtu", |hello| hello.mtu = 0),
        ("mtu", |hello| hello.mtu = 6),
        ("recv_depth", |hello| hello.recv_depth = 3),
        ("recv_depth", |hello| hello.recv_depth = MAX_DEPTH + 1),
        ("message_size", |hello| hello.message_size = 0),
    ];
    for (name, damage) in cases {
        let mut hello = example();
        damage(&mut hello);
        match Greeting::parse(&Greeting::Hello(hello).to_bytes()) {
            Err(GreetingError::Field { field, .. }) => assert_eq!(field, name),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn a_length_that_cannot_be_is_refused_before_the_rest_has_come() {
    let mut bytes = Greeting::Hello(example()).to_bytes();
    bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = GreetingError::Length {
        kind: TYPE_HELLO,
        length: u32::MAX,
    };
    assert_eq!(Greeting::parse(&bytes[..12]), Err(error));
}

#[test]
fn a_rejection_is_cut_to_what_may_travel_and_cannot_steer_a_terminal() {
    let long = Greeting::Reject {
        reason: RejectReason::Full,
        text: "é".repeat(300),
    };
    let Ok(Some((Greeting::Reject { text, .. }, _))) = Greeting::parse(&long.to_bytes()) else {
        panic!("not understood");
    };
    assert_eq!(text, "é".repeat(MAX_TEXT / 2));
    let hostile = Greeting::Reject {
        reason: RejectReason::Full,
        text: "\x1b[2J\nhi".into(),
    };
    let Ok(Some((Greeting::Reject { text, .. }, _))) = Greeting::parse(&hostile.to_bytes()) else {
        panic!("not understood");
    };
    assert_eq!(text, " [2J hi");
}
