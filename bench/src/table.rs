//! The report as tables on a terminal.

use std::fmt::Write;

use tabled::builder::Builder;
use tabled::settings::object::{Columns, Rows};
use tabled::settings::{Alignment, Modify, Style};

use crate::alone::{self, Goal, Relation};
use crate::format::{bytes, digits, short, time, times};
use crate::hosts::Line;
use crate::report::{Mode, Report, Row, Wait};

const HEADER: [&str; 12] = [
    "op",
    "value",
    "memory",
    "MB/s",
    "ops/s",
    "p50 us",
    "p99 us",
    "reg/op",
    "vs reg/op",
    "vs memcpy",
    "cpu client",
    "cpu server",
];

/// All tables of a report, each under a line that says how both sides waited.
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    let mut section = |title: &str, table: String| {
        // Writing to a string does not fail.
        let _ = write!(text, "\n{title}\n{table}\n");
    };
    for (wait, title) in [
        (Wait::Poll, "Client and server both polling"),
        (
            Wait::Event,
            "Server asleep between requests (completion channel)",
        ),
    ] {
        let mut groups: Vec<Wait> = Vec::new();
        for row in measured(report).filter(|row| row.wait == wait) {
            if !groups.contains(&row.client_wait) {
                groups.push(row.client_wait);
            }
        }
        for client_wait in groups {
            let title = match (wait, client_wait) {
                (Wait::Poll, Wait::Poll) => title.to_owned(),
                (Wait::Poll, Wait::Event) => "Server polling, client asleep".to_owned(),
                (Wait::Event, Wait::Poll) => format!("{title}, client polling"),
                (Wait::Event, Wait::Event) => format!("{title}, and client too"),
            };
            let rows =
                measured(report).filter(|row| row.wait == wait && row.client_wait == client_wait);
            section(&title, results(rows));
        }
    }
    let modelled: Vec<&Row> = report
        .results
        .iter()
        .filter(|row| row.mode == Mode::RegisterPerOpModelled)
        .collect();
    if !modelled.is_empty() {
        section(
            "MODELLED, not measured hardware: register-per-op if each registration cost what was \
             published for a NIC",
            modelled_table(report, &modelled),
        );
    }
    if !report.limits.is_empty() {
        section("The limit: plain copies of the same bytes", limits(report));
    }
    if !report.device.one_sided.is_empty() {
        section(
            &format!(
                "One-sided operations on another process, post to completion ({}, {})",
                report.device.name, report.device.link
            ),
            one_sided(report),
        );
    }
    text.push_str(
        "\nFigures are medians over the rounds. Ratios are too: of each round's ratio, so they may differ from the quotient\n\
         of two medians, most of all with --quick.\n",
    );
    text
}

fn measured(report: &Report) -> impl Iterator<Item = &Row> {
    report
        .results
        .iter()
        .filter(|row| row.mode != Mode::RegisterPerOpModelled)
}

fn results<'a>(rows: impl Iterator<Item = &'a Row>) -> String {
    let mut builder = Builder::default();
    builder.push_record(HEADER);
    for row in rows {
        builder.push_record([
            row.op.name().to_owned(),
            bytes(row.size),
            row.mode.name().to_owned(),
            digits(row.mb_per_s),
            short(row.ops_per_s),
            digits(row.p50_us),
            digits(row.p99_us),
            digits(row.registrations_per_op),
            times(row.vs_register_per_op),
            times(row.vs_limit),
            busy(row.client_cpu_s, row.timed_s),
            busy(row.server_cpu_s, row.wall_s),
        ]);
    }
    finish(builder, 3)
}

/// CPU seconds, and the share of a core they are.
fn busy(cpu_s: f64, of_s: f64) -> String {
    let share = if of_s > 0.0 {
        cpu_s / of_s * 100.0
    } else {
        0.0
    };
    format!("{cpu_s:.2} s {share:>3.0}%")
}

fn modelled_table(report: &Report, rows: &[&Row]) -> String {
    let mut builder = Builder::default();
    builder.push_record(["op", "value", "MB/s", "ops/s", "p50 us", "pooled is"]);
    for row in rows {
        let pooled = report.results.iter().find(|pooled| {
            pooled.mode == Mode::Pooled
                && (pooled.op, pooled.size) == (row.op, row.size)
                && (pooled.wait, pooled.client_wait) == (row.wait, row.client_wait)
        });
        builder.push_record([
            row.op.name().to_owned(),
            bytes(row.size),
            digits(row.mb_per_s),
            short(row.ops_per_s),
            digits(row.p50_us),
            times(pooled.and_then(|pooled| pooled.vs_modelled)),
        ]);
    }
    finish(builder, 2)
}

fn limits(report: &Report) -> String {
    let mut builder = Builder::default();
    builder.push_record(["as", "value", "MB/s", "copies/s", "p50 us"]);
    for limit in &report.limits {
        builder.push_record([
            limit.op.name().to_owned(),
            bytes(limit.size),
            digits(limit.mb_per_s),
            short(limit.ops_per_s),
            digits(limit.p50_us),
        ]);
    }
    finish(builder, 2)
}

/// The table of what was measured between two hosts.
pub fn hosts(lines: &[Line]) -> String {
    let mut builder = Builder::default();
    builder.push_record(["over TCP", "unit", "soft0", "plain TCP", "soft0 : plain"]);
    for line in lines {
        builder.push_record([
            line.what.clone(),
            line.unit.to_owned(),
            digits(line.ours),
            digits(line.plain),
            format!("{:.2}", line.ratio),
        ]);
    }
    finish(builder, 2)
        + "\nMedians over the rounds, the ratio that of each round's, so that it may differ from the quotient of two medians:\n\
           on a busy machine, and with --quick, by much."
}

/// The table of the device alone, and what its columns say.
pub fn device(report: &alone::Report) -> String {
    let with_unit = |value: Option<f64>, unit: &str| {
        let value = value.unwrap_or(f64::NAN);
        match unit {
            "" => digits(value),
            "ns" => time(value),
            unit => format!("{} {unit}", digits(value)),
        }
    };
    let mut builder = Builder::default();
    builder.push_record([
        "the device alone",
        "soft0",
        "compared with",
        "that",
        "",
        "result",
        "goal",
        "",
    ]);
    for line in &report.lines {
        let (relation, unit) = match line.relation {
            Relation::Time => ("time", ""),
            Relation::Speed => ("speed", ""),
            Relation::Above => ("above", &*line.unit),
            Relation::Absolute => ("", &*line.unit),
        };
        let goal = match line.goal {
            Some(Goal::AtMost(most)) => format!("<= {most}"),
            Some(Goal::AtLeast(least)) => format!(">= {least}"),
            None => String::new(),
        };
        let other = match (&line.missing, &line.against) {
            (Some(why), _) => why.clone(),
            (None, Some(_)) => with_unit(line.other, &line.unit),
            (None, None) => String::new(),
        };
        let met = match line.met {
            Some(true) => "met",
            Some(false) => "missed",
            None => "",
        };
        builder.push_record([
            line.what.clone(),
            with_unit(line.ours, &line.unit),
            line.against.clone().unwrap_or_default(),
            other,
            relation.to_owned(),
            with_unit(line.value, unit),
            goal,
            met.to_owned(),
        ]);
    }
    let mut table = builder.build();
    table
        .with(Style::sharp())
        .with(Modify::new(Columns::one(1)).with(Alignment::right()))
        .with(Modify::new(Columns::one(3)).with(Alignment::right()))
        .with(Modify::new(Columns::one(5)).with(Alignment::right()))
        .with(Modify::new(Rows::first()).with(Alignment::center()));
    format!(
        "{table}\n\
         time: soft0 : that; speed: that : soft0, of times; above: soft0 - that. Medians over {} rounds, the results\n\
         of each round's, so that they may differ from what two medians give. A goal missed on a busy machine is none.\n",
        report.rounds
    )
}

fn one_sided(report: &Report) -> String {
    let mut builder = Builder::default();
    builder.push_record(["op", "bytes", "median ns", "memcpy ns", "above memcpy ns"]);
    for row in &report.device.one_sided {
        builder.push_record([
            row.op.clone(),
            bytes(row.size),
            digits(row.median_ns),
            digits(row.memcpy_ns),
            digits(row.above_memcpy_ns),
        ]);
    }
    finish(builder, 2)
}

/// Draws the table; columns from `numbers` on, and the sizes before them, are right-aligned.
fn finish(builder: Builder, numbers: usize) -> String {
    let mut table = builder.build();
    table
        .with(Style::sharp())
        .with(Modify::new(Columns::one(1)).with(Alignment::right()))
        .with(Modify::new(Columns::new(numbers..)).with(Alignment::right()))
        .with(Modify::new(Rows::first()).with(Alignment::center()));
    table.to_string()
}
