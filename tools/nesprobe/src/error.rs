//! What can go wrong, and the exit status that says so.

use std::process::ExitCode;

use ash::vk;

/// A failure; the text says what failed, the value, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No library to load.
    #[error(
        "there is no Vulkan loader: {0}; install it (Debian: libvulkan1) or name its folder in \
         LD_LIBRARY_PATH"
    )]
    NoVulkan(String),
    /// No library to load.
    #[error(
        "there is no EGL: {0}; install it (Debian: libegl1) or name its folder in LD_LIBRARY_PATH"
    )]
    NoEgl(String),
    /// The libraries are there, and find nothing to work on.
    #[error("{0}")]
    NoDevice(String),
    /// What `--device` asked for cannot be told.
    #[error("{0}")]
    Choice(String),
    /// A call of Vulkan.
    #[error("{call}: {}", name(*.result))]
    Vulkan {
        /// The call.
        call: &'static str,
        /// What it returned.
        result: vk::Result,
    },
    /// Anything of EGL and OpenGL.
    #[error("{0}")]
    Gl(String),
    /// A call of the system.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Something that this device or its driver cannot do.
    #[error("{0}")]
    Unfit(String),
}

/// What every fallible function here returns.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The exit status, as `--help` documents it.
    pub fn exit(&self) -> ExitCode {
        ExitCode::from(match self {
            Error::NoVulkan(_) | Error::NoEgl(_) | Error::NoDevice(_) => 3,
            Error::Choice(_) => 2,
            _ => 1,
        })
    }
}

/// Gives a result of Vulkan the name of its call.
pub trait Called<T> {
    /// Names the call.
    fn called(self, call: &'static str) -> Result<T>;
}

impl<T> Called<T> for std::result::Result<T, vk::Result> {
    fn called(self, call: &'static str) -> Result<T> {
        self.map_err(|result| Error::Vulkan { call, result })
    }
}

/// Gives an error of the system what was tried.
pub trait Tried<T> {
    /// Says what was tried.
    fn tried(self, what: impl Into<String>) -> Result<T>;
}

impl<T, E: Into<std::io::Error>> Tried<T> for std::result::Result<T, E> {
    fn tried(self, what: impl Into<String>) -> Result<T> {
        self.map_err(|error| Error::System { what: what.into(), source: error.into() })
    }
}

/// `VK_ERROR_DEVICE_LOST`, as the specification writes it.
pub fn name(result: vk::Result) -> String {
    let known = format!("{result:?}");
    let is_name = known.chars().all(|it| it.is_ascii_uppercase() || it == '_');
    if is_name {
        format!("VK_{known}")
    } else {
        format!("VkResult {}", result.as_raw())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_has_the_name_that_the_specification_gives_it() {
        assert_eq!(name(vk::Result::ERROR_DEVICE_LOST), "VK_ERROR_DEVICE_LOST");
        assert_eq!(name(vk::Result::from_raw(-77)), "VkResult -77");
    }

    #[test]
    fn a_missing_loader_and_a_missing_device_share_an_exit_status() {
        let status = |error: Error| format!("{:?}", error.exit());
        assert_eq!(status(Error::NoVulkan(String::new())), status(Error::NoDevice(String::new())));
    }
}
