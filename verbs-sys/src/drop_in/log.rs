//! What the library says of itself, for those who ask: a C program has no other way to listen.

use std::sync::Once;

use tracing::level_filters::LevelFilter;

/// `error`, `warn`, `info`, `debug` or `trace`; without it nothing is said.
const VARIABLE: &str = "VERBS_SOFT_LOG";

static STARTED: Once = Once::new();

/// Writes what happens to standard error, if the environment says from which level on.
pub(super) fn start() {
    STARTED.call_once(|| {
        let Ok(wanted) = std::env::var(VARIABLE) else {
            return;
        };
        let level = wanted.trim().parse::<LevelFilter>();
        let log = tracing_subscriber::fmt()
            .with_max_level(*level.as_ref().unwrap_or(&LevelFilter::ERROR))
            .with_writer(std::io::stderr)
            .with_ansi(false);
        // Where somebody has done so already, that one goes on.
        if log.try_init().is_ok() && level.is_err() {
            tracing::error!(
                variable = VARIABLE,
                wanted,
                "no level: `error`, `warn`, `info`, `debug` or `trace`"
            );
        }
    });
}
