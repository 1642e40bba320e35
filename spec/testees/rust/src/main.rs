//! A testee to start from (spec/testee-protocol.md):
//!
//!     cargo build --release && boundary-bundle conformance -- target/release/testee
//!
//! Fill in the functions with your codec; what it cannot do stays skipped.

use serde_json::{json, Value};
use std::io::{self, BufRead, Write};
use std::panic;

fn hello() -> Value {
    json!({
        "protocol": 1, "name": "template", "language": "Rust", "version": "0",
        "classes": ["one", "core", "stream"], // those that your codec has
        "dtypes": ["f32", "i32"],
    })
}

/// Decode data with the class request["class"], in pieces of the sizes request["pieces"] if it has them.
/// Return "bundles", and "error" with "name", "number" and "offset" if there was one. Integers of 64
/// bits are strings.
fn decode(_request: &Value, _data: &[u8]) -> Value {
    json!({"skipped": "no decoder yet"})
}

/// Return "data" in hexadecimal digits, or "error".
fn encode(_request: &Value, _bundle: &Value) -> Value {
    json!({"skipped": "no encoder yet"})
}

fn bytes(text: &str) -> Vec<u8> {
    let digit = |c: u8| (c as char).to_digit(16).expect("a hexadecimal digit") as u8;
    text.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

fn answer(request: &Value) -> Value {
    match request["cmd"].as_str() {
        Some("hello") => hello(),
        Some("stop") => json!({}),
        Some("decode" | "stream") => decode(request, &bytes(request["data"].as_str().expect("data"))),
        Some("encode") => encode(request, &request["bundle"]),
        _ => json!({"skipped": "unknown command"}),
    }
}

fn main() -> io::Result<()> {
    let mut out = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line?)?;
        // A panic is a fault of this program, not of the input.
        let mut told = panic::catch_unwind(|| answer(&request)).unwrap_or(json!({"failed": "it panicked"}));
        told["seq"] = request["seq"].clone();
        writeln!(out, "{told}")?;
        out.flush()?;
        if request["cmd"] == "stop" {
            break;
        }
    }
    Ok(())
}
